"""A small random input for a layer of transformers, made by the names of its arguments; then the proof (`probe.py`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from agglo.hosts.common import probe
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.transformers.loop import TUPLES
from agglo.hosts.transformers.parts import LayerParts, Structure, parts_for
from agglo.hosts.transformers.positions import bias_of, table_of

_ROWS, _COLUMNS = 3, 4


def prove(layers: list[Any], where: str) -> None:
    """UnsupportedModelError if a layer of some kind is not what its structure says."""
    for layer in layers:
        kind = probe.kind_of(layer)
        if not probe.is_proved(kind):
            _prove(layer, where)
            probe.remember(kind)


def _prove(layer: Any, where: str) -> None:
    structure = Structure.of(layer)
    assert isinstance(structure, Structure)
    twin: Any = probe.random_copy(layer)
    if twin is None:
        return
    _still(twin, structure)
    names = list(inspect.signature(layer.forward).parameters)[1:]
    patches = _window(twin) or (_ROWS, _COLUMNS)
    n_tokens = patches[0] * patches[1] + (1 if _window(twin) else 0)
    norm = getattr(twin, structure.norms[0])
    device = norm.weight.device
    batch = int(getattr(layer, "num_frames", 2))
    x = torch.randn(batch, n_tokens, norm.weight.shape[-1], generator=torch.Generator().manual_seed(1)).to(device)
    given = _arguments(twin, names, structure, patches, batch, n_tokens, device)
    packed = "cu_seqlens" in names
    parts: LayerParts = parts_for(twin, structure, given)
    try:
        _require_kind(twin, x, given, packed, where)
        bias = bias_of(twin, given, n_tokens)
        table = table_of(given)
        whole = _Packed(parts) if packed else parts
        off = probe.difference(twin, whole, x, table, bias)
        if table is not None:  # as merged tokens have it: another one for every image
            each = table.expand(batch, 1, -1, -1)
            off = max(off, probe.difference(twin, whole, x, each, bias))
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise probe.unproved(layer, where, error) from error
    probe.require_close(off, layer, where)


def _require_kind(layer: Any, x: Tensor, given: dict[str, Any], packed: bool, where: str) -> None:
    """A layer that gives a tuple is known for it: the loop must give one too."""
    layer.eval()
    with torch.no_grad():
        out = layer.forward(x[0] if packed else x, **given)
    if isinstance(out, tuple) != (type(layer).__name__ in TUPLES):
        raise UnsupportedModelError(
            f"{type(layer).__name__} of {where} gives a {type(out).__name__}, which agglo did not expect of it"
        )


class _Packed(LayerParts):
    """A layer that takes packed tokens (S, C): images run one by one."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts.structure, parts.given)

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return torch.stack([LayerParts.whole(self, block, image, rotary) for image in x])


def _arguments(
    layer: Any,
    names: list[str],
    structure: Structure,
    patches: tuple[int, int],
    batch: int,
    n_tokens: int,
    device: torch.device,
) -> dict[str, Any]:
    rows, columns = patches
    generator = torch.Generator().manual_seed(2)
    down, right = torch.rand(2, structure.head_width // 2, generator=generator)
    points = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
    angles = (points[:, :1] * down + points[:, 1:] * right).repeat(1, 2).to(device)
    # transformers takes attention that does not say for causal if there is no mask.
    says = hasattr(attention_module(layer, structure), "is_causal") or "cu_seqlens" in names
    known: dict[str, Any] = {
        "attention_mask": None if says else torch.zeros(batch, 1, n_tokens, n_tokens, device=device),
        "position_embeddings": (angles.cos(), angles.sin()),
        "cu_seqlens": torch.tensor([0, n_tokens], device=device, dtype=torch.int32),
        "resolution": (rows * _patch(layer), columns * _patch(layer)),
        "dataset_index": torch.zeros(batch, dtype=torch.long, device=device),
        "position_mask": None,
    }
    return {name: known[name] for name in names if name in known}


def _window(layer: Any) -> tuple[int, int] | None:
    """The patches for which a layer with relative positions is made, which also have a class token."""
    for part in layer.modules():
        if hasattr(part, "window_size") and hasattr(part, "relative_position_bias_table"):
            rows, columns = part.window_size
            return int(rows), int(columns)
    return None


def _patch(layer: Any) -> int:
    if hasattr(layer, "patch_size"):
        return int(layer.patch_size)
    config = next((part.config for part in layer.modules() if hasattr(part, "config")), None)
    patch = getattr(config, "patch_size", 1)
    return patch if isinstance(patch, int) else int(patch[0])


def attention_module(layer: Any, structure: Structure) -> Any:
    """The module with the projections to q, k and v."""
    for name in structure.attention.split("."):
        layer = getattr(layer, name)
    return layer


def _still(layer: Any, structure: Structure) -> None:
    """No dropout of attention weights, which kernels draw in ways of their own."""
    for name, part in attention_module(layer, structure).named_children():
        if isinstance(part, nn.Dropout) and name != "projection_dropout":
            part.p = 0.0
    for part in layer.modules():  # the copy's own configuration
        if hasattr(getattr(part, "config", None), "attention_probs_dropout_prob"):
            part.config.attention_probs_dropout_prob = 0.0
