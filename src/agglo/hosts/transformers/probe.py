"""Small random inputs for a layer of transformers, made by the names of its arguments, for `hosts/common/probe.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from agglo.hosts.common.blocks import AttentionInputs
from agglo.hosts.common.probe import Case, random_input
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.transformers.loop import TUPLES
from agglo.hosts.transformers.parts import LayerParts, Structure, get, parts_for
from agglo.hosts.transformers.positions import bias_of, patch_size, table_of


def probe_cases(layer: Any) -> Iterator[Case]:
    """Yield inputs for a copy of a layer, with every kind of positions that it may be handed."""
    structure = Structure.of(layer)
    assert isinstance(structure, Structure)
    _stop_attention_dropout(layer, structure)
    names = list(inspect.signature(layer.forward).parameters)[1:]
    window = _window(layer)
    rows, columns = window or (3, 4)
    n_tokens, batch = rows * columns + (window is not None), int(getattr(layer, "num_frames", 2))
    weight = getattr(layer, structure.norms[0]).weight
    x = random_input((batch, n_tokens, weight.shape[-1]), weight)
    given = _arguments(layer, names, structure, (rows, columns), x)
    packed = "cu_seqlens" in names
    layer.eval()
    with torch.no_grad():
        out = layer.forward(x[0] if packed else x, **given)
    if isinstance(out, tuple) != (type(layer).__name__ in TUPLES):
        raise UnsupportedModelError(
            f"{type(layer).__name__} gives a {type(out).__name__}, which agglo did not expect of it"
        )
    parts = _Packed(structure, given) if packed else parts_for(layer, structure, given)
    table, bias = table_of(given), bias_of(layer, given, n_tokens)
    yield parts, x, AttentionInputs(rotary=table, bias=bias)
    if table is not None:  # as merged tokens have it: another one for every image
        yield parts, x, AttentionInputs(rotary=table.expand(batch, 1, -1, -1), bias=bias)


class _Packed(LayerParts):
    """A layer that takes packed tokens (S, C): images run one by one."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return torch.stack([super(_Packed, self).whole(block, image, rotary) for image in x])


def _arguments(layer: Any, names: list[str], structure: Structure, grid: tuple[int, int], x: Tensor) -> dict[str, Any]:
    (batch, n_tokens, _), device = x.shape, x.device
    down, right = torch.rand(2, structure.head_width // 2, generator=torch.Generator().manual_seed(2))
    points = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).float()
    angles = (points[:, :1] * down + points[:, 1:] * right).repeat(1, 2).to(device)
    # transformers takes attention that does not say for causal if there is no mask.
    says = hasattr(get(layer, structure.attention), "is_causal") or "cu_seqlens" in names
    known: dict[str, Any] = {
        "attention_mask": None if says else torch.zeros(batch, 1, n_tokens, n_tokens, device=device),
        "position_embeddings": (angles.cos(), angles.sin()),
        "cu_seqlens": torch.tensor([0, n_tokens], device=device, dtype=torch.int32),
        "resolution": tuple(side * patch_size(layer) for side in grid),
        "dataset_index": torch.zeros(batch, dtype=torch.long, device=device),
        "position_mask": None,
    }
    return {name: known[name] for name in names if name in known}


def _window(layer: Any) -> tuple[int, int] | None:
    """Return the patches for which a layer with relative positions is made, which also have a class token."""
    for part in layer.modules():
        if hasattr(part, "window_size") and hasattr(part, "relative_position_bias_table"):
            return int(part.window_size[0]), int(part.window_size[1])
    return None


def _stop_attention_dropout(layer: Any, structure: Structure) -> None:
    """Stop the dropout of attention weights, which kernels draw in ways of their own."""
    for name, part in get(layer, structure.attention).named_children():
        if isinstance(part, nn.Dropout) and name != "projection_dropout":
            part.p = 0.0
    for part in layer.modules():  # the copy's own configuration
        if hasattr(getattr(part, "config", None), "attention_probs_dropout_prob"):
            part.config.attention_probs_dropout_prob = 0.0
