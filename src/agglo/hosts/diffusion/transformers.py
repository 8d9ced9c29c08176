"""Diffusion transformers over pictures and videos."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from agglo.hosts.diffusion.family import Argument, Axes, Family, Modules, all_named, blocks_of, site_of
from agglo.hosts.diffusion.rotary import Ids


class PatchTransformer(Family):
    """Transformers of BasicTransformerBlocks over patches: DiT, PixArt."""

    models = "DiTTransformer2DModel, PixArtTransformer2DModel"

    def recognises(self, model: nn.Module) -> bool:
        own = model._modules
        over_time = "temporal_transformer_blocks" in own
        return "pos_embed" in own and not over_time and all_named(own, "transformer_blocks", "BasicTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "BasicTransformerBlock")):
            attention: Any = block.attn1
            site = site_of(index, name, attention)
            yield Modules(site, block, (attention,), "tokens", block.attn2, block.ff)  # type: ignore[arg-type]

    def axes(self, model: Any, argument: Argument) -> Axes | None:
        height, width = argument("hidden_states").shape[-2:]
        return height // model.config.patch_size, width // model.config.patch_size

    def own_axes(self, model: Any) -> Axes | None:
        axes = super().own_axes(model)
        return None if axes is None else tuple(length // model.config.patch_size for length in axes)


class SD3(PatchTransformer):
    """Stable Diffusion 3: text and image attend jointly, as two streams."""

    models = "SD3Transformer2DModel"

    def recognises(self, model: nn.Module) -> bool:
        own = model._modules
        return "pos_embed" in own and all_named(own, "transformer_blocks", "JointTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "JointTransformerBlock")):
            attentions: Any = (block.attn,) if block.attn2 is None else (block.attn, block.attn2)
            yield Modules(site_of(index, name, attentions[0]), block, attentions, "joint", None, block.ff)  # type: ignore[arg-type]


class Flux(Family):
    """Flux: blocks of two streams, then blocks in which text and image are one sequence."""

    models = "FluxTransformer2DModel"

    def recognises(self, model: nn.Module) -> bool:
        own = model._modules
        singles = "single_transformer_blocks" in own
        return singles and all_named(own, "transformer_blocks", "FluxTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        blocks = blocks_of(model, "FluxTransformerBlock", "FluxSingleTransformerBlock")
        for index, (name, block) in enumerate(blocks):
            attention: Any = block.attn
            yield Modules(site_of(index, name, attention), block, (attention,), "flux")

    def axes(self, model: nn.Module, argument: Argument) -> Axes | None:
        return None if torch.compiler.is_compiling() else grid_of_ids(_ids(argument("img_ids")))

    def places(self, model: Any, argument: Argument) -> Ids:
        return Ids(_ids(argument("txt_ids")), _ids(argument("img_ids")), model.pos_embed)


def _ids(ids: Tensor) -> Tensor:
    return ids[0] if ids.dim() == 3 else ids


def grid_of_ids(ids: Tensor) -> Axes | None:
    """(rows, columns) of ids (N, 3) that count them in the last two columns; None if they form no single grid.

    >>> grid_of_ids(torch.cartesian_prod(torch.tensor([0.0]), torch.arange(2.0), torch.arange(3.0)))
    (2, 3)
    """
    rows, columns = (int(number) + 1 for number in ids[:, -2:].amax(dim=0).tolist())
    if rows * columns != ids.shape[0]:
        return None
    index = torch.arange(ids.shape[0], device=ids.device)
    expected = torch.stack([index // columns, index % columns], dim=-1)
    return (rows, columns) if torch.equal(ids[:, -2:].long(), expected) else None


class Wan(Family):
    """Wan: tokens over frames, rows and columns, rotary positions, text by cross-attention."""

    models = "WanTransformer3DModel"

    def recognises(self, model: nn.Module) -> bool:
        return all_named(model._modules, "blocks", "WanTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "WanTransformerBlock")):
            attention: Any = block.attn1
            yield Modules(site_of(index, name, attention), block, (attention,), "rotary", block.attn2, block.ffn)  # type: ignore[arg-type]

    def axes(self, model: Any, argument: Argument) -> Axes | None:
        lengths = argument("hidden_states").shape[-3:]
        return tuple(length // patch for length, patch in zip(lengths, model.config.patch_size, strict=True))


class LTX(Family):
    """LTX-Video: as Wan, with tokens in a sequence from the start."""

    models = "LTXVideoTransformer3DModel"

    def recognises(self, model: nn.Module) -> bool:
        return all_named(model._modules, "transformer_blocks", "LTXVideoTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "LTXVideoTransformerBlock")):
            attention: Any = block.attn1
            yield Modules(site_of(index, name, attention), block, (attention,), "rotary", block.attn2, block.ff)  # type: ignore[arg-type]

    def axes(self, model: nn.Module, argument: Argument) -> Axes | None:
        lengths = argument("num_frames"), argument("height"), argument("width")
        if argument("video_coords") is not None or None in lengths:
            raise RuntimeError(
                "agglo needs the grid of LTX's tokens: call the model with num_frames, height and width, and without "
                "video_coords"
            )
        return lengths
