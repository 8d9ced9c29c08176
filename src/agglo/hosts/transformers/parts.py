"""How a layer of transformers comes apart, and small random inputs that prove it (`hosts/common/probe.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from agglo.hosts.common.blocks import AttentionInputs, Projected
from agglo.hosts.common.layers import LayerParts, Structure, get
from agglo.hosts.common.probe import ProbeCase, random_input
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.transformers.positions import bias_of, patch_size, table_of

# Layers that give a tuple; the probe finds out about others.
TUPLES = ("Data2VecVisionLayer", "VJEPA2Layer", "TimesformerLayer", "Llama4VisionEncoderLayer")


class TransformersParts(LayerParts):
    """A layer of transformers."""

    @property
    def treats_images_alike(self) -> bool:  # type: ignore[override]
        return not any(isinstance(value, Tensor) for value in self.given.values())

    @property
    def needs_all_tokens(self) -> bool:  # type: ignore[override]
        return any(isinstance(value, (Tensor, tuple, list)) for value in self.given.values())

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        # Not by calling the block: transformers hangs hooks on it that would collect merged tokens as hidden states,
        # and it would do its own gradient checkpointing inside of ours.
        out = block.forward(x, **self.given)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def project_normed(self, attention: Any, x: Tensor, rotary: Tensor | None, n_front: int | None) -> Projected:
        rotates = rotary is not None or hasattr(attention, "apply_rotary_embeddings")
        # The first tokens may be rotated too.
        return super().project_normed(attention, x, rotary, None if rotates else n_front)

    def rotate(self, attention: Any, q: Tensor, k: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor]:
        if hasattr(attention, "apply_rotary_embeddings"):
            return _rotated_by_library(attention, q, rotary), _rotated_by_library(attention, k, rotary)
        return (q, k) if rotary is None else (_rotated(q, rotary), _rotated(k, rotary))


class _MessageParts(TransformersParts):
    """X-CLIP's layer: a message token, made of the class tokens of all frames, has key and value but no query."""

    treats_images_alike = False

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        options = {name: value for name, value in self.given.items() if name != "attention_mask"}
        message = block.message_fc(x[:, 0]).unflatten(0, (-1, block.num_frames))
        message = message + block.drop_path(block.message_attn(block.message_ln(message), **options)[0])
        tokens = torch.cat([x, message.reshape(len(x), 1, -1)], dim=1)
        projected = super().project(block, tokens, rotary, n_front)
        n_queries = x.shape[1] if n_front is None else n_front
        return replace(projected, q=projected.q[:, :, :n_queries], features=projected.k[:, :, : x.shape[1]])

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return out  # its stochastic depth is of the message alone


def parts_for(layer: nn.Module, structure: Structure, given: Mapping[str, Any]) -> TransformersParts:
    """Return how a layer of a known structure comes apart."""
    return (_MessageParts if hasattr(layer, "message_attn") else TransformersParts)(structure, given)


def _rotated_by_library(attention: Any, x: Tensor, positions: Tensor | None) -> Tensor:
    """Rotate x (B, H, T, d) to positions (B, T, 3), or to those of a whole grid if there are none."""
    if positions is None:
        axes = attention.get_position_ids(x.transpose(1, 2))
    else:
        axes = tuple(axis.unsqueeze(1).to(x.dtype) for axis in positions.unbind(dim=-1))
    return cast(Tensor, attention.apply_rotary_embeddings(x, axes))


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x (B, H, T, d) by a table of sines and cosines (..., n, 2d) of its last n tokens."""
    front = x.shape[2] - table.shape[-2]
    sine, cosine = table.chunk(2, dim=-1)
    here = x[:, :, front:]
    first, second = here.chunk(2, dim=-1)
    turned = (here * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)
    return torch.cat([x[:, :, :front], turned], dim=2) if front else turned


def probe_cases(layer: Any) -> Iterator[ProbeCase]:
    """Yield inputs for a copy of a layer, made by the names of its arguments, with every kind of positions."""
    structure = Structure.of(layer)
    names = list(inspect.signature(layer.forward).parameters)[1:]
    windows = [part.window_size for part in layer.modules() if hasattr(part, "relative_position_bias_table")]
    rows, columns = windows[0] if windows else (3, 4)
    n_tokens, batch = rows * columns + len(windows[:1]), int(getattr(layer, "num_frames", 2))  # with a class token
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
    parts = _PackedParts(structure, given) if packed else parts_for(layer, structure, given)
    table, bias = table_of(given), bias_of(layer, given, n_tokens)
    yield parts, x, AttentionInputs(rotary=table, bias=bias)
    if table is not None:  # as merged tokens have it: another one for every image
        yield parts, x, AttentionInputs(rotary=table.expand(batch, 1, -1, -1), bias=bias)


class _PackedParts(TransformersParts):
    """A layer that takes packed tokens (S, C): images run one by one."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return torch.stack([super(_PackedParts, self).whole(block, image, rotary) for image in x])


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
