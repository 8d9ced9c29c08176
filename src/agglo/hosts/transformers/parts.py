"""How a layer of transformers comes apart, what it is handed about positions, and inputs that prove it (`probe.py`).

Rotary tables come as cosines and sines of every token, or of patches alone. Where the patches lie is read off a table
that goes row by row; Qwen's towers go by another order, and there the positions travel with the table: two more
channels that no layer of the library gets to see.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from agglo.hosts.common.blocks import AttentionInputs, Projected
from agglo.hosts.common.layers import LayerParts, Structure, get
from agglo.hosts.common.positions import Positions
from agglo.hosts.common.probe import ProbeCase, random_input
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.methods import Grid

# Layers that give a tuple; the probe finds out about others.
TUPLES = ("Data2VecVisionLayer", "VJEPA2Layer", "TimesformerLayer", "Llama4VisionEncoderLayer")
_TABLES = "position_embeddings"
_AXES = 2  # channels that carry the position
_TILE_MULTIPLE = 8
_LISTS = ("layers", "layer", "blocks")
_LOOPS = ("encoder", "transformer", "model")


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


def append_positions(owner: Any) -> dict[str, Any]:
    """Return a stand-in for the rotary module of a tower whose patches come in an order of their own, if it is one."""
    rotary = getattr(owner, "rotary_pos_emb", None)
    if not isinstance(rotary, nn.Module) or not hasattr(owner, "spatial_merge_size"):
        return {}

    def with_positions(x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        where = position_ids.float()
        return tuple(torch.cat([table, where.to(table.dtype)], dim=-1) for table in rotary(x, position_ids))

    return {"rotary_pos_emb": with_positions}


def split_positions(given: dict[str, Any], has_positions: bool) -> tuple[dict[str, Any], Tensor | None]:
    """Return what a layer is handed without the positions that travel with its table, and these (N, 2)."""
    tables = given.get(_TABLES)
    if not has_positions or tables is None:
        return given, None
    points = tables[0][..., -_AXES:]
    return {**given, _TABLES: tuple(table[..., :-_AXES] for table in tables)}, points


def table_of(given: Mapping[str, Any]) -> Tensor | None:
    """Return the sines and cosines (N, 2d) that a layer is handed, if any."""
    tables = given.get(_TABLES)
    if tables is None:
        return None
    cosine, sine = tables
    table = torch.cat([sine, cosine], dim=-1)
    while table.dim() > 2 and table.shape[0] == 1:
        table = table[0]
    if table.dim() != 2:
        raise ValueError(f"rotary tables {tuple(cosine.shape)}, one for every image: give images of one size")
    return table


def positions_of(
    layer: Any,
    table: Tensor | None,
    points: Tensor | None,
    ends: tuple[int, int],
    n_tokens: int,
    grid: Grid | None,
) -> Positions | None:
    """Return where the tokens of a batch are; None where layers have no rotary positions.

    Args:
        table: (N, 2d), of all tokens or of those behind the prefix.
        points: (N, 2) where the patches lie, or (B, N, 2): of every image or window, the table being that of the first.
        ends: Tokens in front and at the end that are never merged.
        n_tokens: All of them.
        grid: Taken for the patches' where the table cannot be looked at, in a graph that is compiled.
    """
    attention: Any = getattr(layer, "attention", None)
    if hasattr(attention, "get_position_ids"):
        axes = attention.get_position_ids(torch.empty(1, n_tokens, 0, device=next(layer.parameters()).device))
        return Positions(torch.stack(axes, dim=-1))
    if table is None:
        return None
    prefix, suffix = ends
    if suffix or table.shape[0] not in (n_tokens, n_tokens - prefix):
        raise ValueError(f"a rotary table of {table.shape[0]} positions does not fit {n_tokens} tokens")
    n_front = table.shape[0] - (n_tokens - prefix)
    table = table[n_front:]
    if points is not None:
        each = points.long() if points.dim() == 3 else points.long()[None]
        elsewhere = each.float() if bool((each != each[:1]).any()) else None
        return Positions(each[0], elsewhere, n_front)
    fits = grid is not None and grid[0] * grid[1] == len(table)
    rows = grid if fits and grid is not None and torch.compiler.is_compiling() else rows_and_columns(table)
    return Positions(rows, n_front=n_front)


def rows_and_columns(table: Tensor) -> tuple[int, int]:
    """Return the grid of a table (N, 2d) that goes row by row, each channel following either the row or the column.

    The first patch where a channel changes that the first step leaves alone begins the second row. A single column is
    taken for a single row, which has the same angles.
    """
    if len(table) < 3:
        return 1, len(table)
    rows = (table[1] - table[0]).abs() < 1e-6
    changes = ((table - table[0]).abs() > 1e-5) & rows
    begins = changes.any(dim=1).int().argmax()
    columns = int(begins) if bool(changes.any()) else len(table)
    return (len(table) // columns, columns) if len(table) % columns == 0 else (1, len(table))


def bias_of(layer: Any, given: Mapping[str, Any], n_tokens: int) -> Tensor | None:
    """Return the bias (1 or B, H or 1, T, T) that a layer has, or is handed, if any."""
    names = ("relative_position_bias", "attention_mask")
    tables = [_additive(given[name]) for name in names if given.get(name) is not None]
    attention, resolution = getattr(getattr(layer, "attention", None), "attention", None), given.get("resolution")
    modules = [getattr(owner, "relative_position_bias", None) for owner in (layer, attention)]
    module: Any = next((found for found in modules if found is not None), None)
    if module is not None and resolution is not None:
        patch = patch_size(layer)
        window = int(resolution[0]) // patch, int(resolution[1]) // patch
        tables.append(module(window, bool(given.get("interpolate_pos_encoding")), dim_size=n_tokens))
    return sum(tables[1:], start=tables[0]) if tables else None


def _additive(mask: Tensor) -> Tensor:
    """Return a mask as it is added to logits, where it says True for what is open."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)


def patch_size(layer: Any) -> int:
    """Return the side in pixels of a patch of a layer that is handed the resolution of the image."""
    config = getattr(getattr(getattr(layer, "attention", None), "attention", None), "config", None)
    found = getattr(layer, "patch_size", getattr(config, "patch_size", 1))
    return int(found if isinstance(found, int) else found[0])


def has_tiles(owner: Any) -> bool:
    """Return whether the loop over layers is Mllama's, whose images are cut into tiles."""
    return type(owner).__name__ == "MllamaVisionEncoder"


def tile_lengths(config: Any) -> tuple[int, int]:
    """Return how many tokens of one of Mllama's tiles are patches, and how many are never merged.

    Each tile brings a class token in front and, so that there is a multiple of 8, padding at its end. Patches are
    merged also with those of other tiles. Only the first of the two loops over layers is reduced: before the second one
    every tile is given its own embedding.
    """
    patches = (config.image_size // config.patch_size) ** 2
    return patches, 1 + (-(patches + 1)) % _TILE_MULTIPLE


def tile_order(config: Any, x: Tensor) -> tuple[Tensor, int]:
    """Return the order (T,) of tokens x (B, T, C) in which those that are never merged come first, and their number."""
    patches, kept = tile_lengths(config)
    positions = torch.arange(x.shape[1], device=x.device).view(-1, patches + kept)
    others = torch.cat([positions[:, :1], positions[:, 1 + patches :]], dim=1).flatten()
    return torch.cat([others, positions[:, 1 : 1 + patches].flatten()]), len(others)


def loop_of(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the module with the layers of what may be a tower, and their name in it."""
    for owner in (module, *(child for name in _LOOPS if (child := module._modules.get(name)) is not None)):
        for name in _LISTS:
            layers = owner._modules.get(name)
            if isinstance(layers, nn.ModuleList) and len(layers) > 1:
                return owner, name
    return None


def pair(size: Any) -> tuple[int, int]:
    """Return a size of both sides."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
