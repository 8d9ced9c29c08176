"""The number of tokens that an image takes in the language model's prompt, and the merge of the connector's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.hosts.common.swap import Setting
from agglo.methods import Grid, Method, Outcome, View
from agglo.methods.base import square
from agglo.plan import Plan
from agglo.tracing import Step, Trace


@dataclass(frozen=True)
class SmallerImages:
    """The baseline of merging: scale `pixel_values`, the first argument of `get_image_features`.

    Attributes:
        pixels: Pixels along the side of one token.
        interpolate_positions: Whether the tower must be asked to interpolate its position embeddings.
    """

    pixels: int
    interpolate_positions: bool

    def __call__(
        self, side: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return other arguments, with `side` tokens along the side of an image."""
        kwargs = {**kwargs, "interpolate_pos_encoding": True} if self.interpolate_positions else dict(kwargs)
        size = (side * self.pixels, side * self.pixels)
        mask = kwargs.get("pixel_attention_mask")
        if mask is not None:
            kwargs["pixel_attention_mask"] = _scaled(mask.float(), size, "nearest").to(mask.dtype)
        elif len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], _scaled(args[1].float(), size, "nearest").to(args[1].dtype), *args[2:])
        if args:
            return (_scaled(args[0], size, "bicubic"), *args[1:]), kwargs
        return args, {**kwargs, "pixel_values": _scaled(kwargs["pixel_values"], size, "bicubic")}


def _scaled(images: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    flat = images.reshape(-1, 1, *images.shape[-2:])
    return F.interpolate(flat, size, mode=mode, antialias=mode == "bicubic").reshape(*images.shape[:-2], *size)


@dataclass(frozen=True)
class VLMReduction(Setting):
    """What `agglo.apply` put into a vision-language model that is given fewer tokens.

    Attributes:
        config: The reduction as it was asked for.
        owner: The model's class before that.
        dense: Tokens that an image takes without reduction; None where images differ in size.
        plan: The plan of the tower, or of the merge after it, which then counts as a model of one block.
        depth: Its number of blocks.
        handed_on: Tokens that an image takes where the tower's groups pass a pointwise connector; None where the
            connector's outputs are merged instead.
        method: The method that merges them.
        tower_method: The method of the tower; None where the tower runs whole.
        patches_per_token: Patches of the tower that the connector makes one token of.
        shrink: Makes images smaller, in place of merging; the method then says how many tokens are left.
    """

    config: ReductionConfig
    owner: type[nn.Module]
    dense: int | None
    plan: Plan
    depth: int
    handed_on: int | None = None
    method: Method | None = None
    tower_method: Method | None = None
    patches_per_token: int = 1
    shrink: SmallerImages | None = None

    def count(self, dense: int | None = None, grid: Grid | None = None, *, strict: bool = False) -> int:
        """Return the tokens of an image.

        Args:
            dense: The tokens that it takes without reduction.
            grid: (rows, columns) of these; None for a square, if they make one.
            strict: Raise ValueError where fewer than possible are asked for; otherwise at least one stays.
        """
        if self.handed_on is not None:
            return self.handed_on
        dense = self.dense if dense is None else dense
        if dense is None:
            raise ValueError(
                "how many tokens an image of this model takes depends on its size: say how many it takes without "
                "reduction, as in agglo.image_tokens(model, 256)"
            )
        assert self.method is not None
        grid = square(dense) if grid is None else grid
        if self.tower_method is None:
            target = self.plan.targets(self.method, dense, 1, grid, strict=strict)[0]
            return dense if target is None else target
        patches, side = dense * self.patches_per_token, round(self.patches_per_token**0.5)
        patch_grid = None if grid is None else (grid[0] * side, grid[1] * side)
        left = self.plan.counts(self.tower_method, patches, self.depth, patch_grid)[-1]
        asked = dense * left // patches
        if strict and asked < 1:
            raise ValueError(
                f"{self.plan.schedule!r} leaves {left} of {patches} patches, which is less than one of the {dense} "
                "tokens that the connector makes of them"
            )
        if not strict:
            asked = max(asked, self.method.least(dense))
        return dense if asked >= dense else self.method.stages(dense, [asked], grid)[0]

    def merge(self, tokens: Tensor, grid: Grid | None, training: bool) -> tuple[Tensor, Outcome | None]:
        """Merge the connector's outputs (B, M, D) of images of one size to (B, K, D); also return the outcome."""
        n_tokens = int(tokens.shape[1])
        target = self.count(n_tokens, grid)
        if target >= n_tokens:
            return tokens, None
        assert self.method is not None
        grid = square(n_tokens) if grid is None else grid
        view = View(tokens, target=target, grid=grid, training=training)
        outcome = self.method.decide(view)
        return outcome.new_tokens(tokens), outcome


def vlm_reduction_of(module: nn.Module) -> VLMReduction | None:
    applied = getattr(module, "agglo_applied", None)
    return applied if isinstance(applied, VLMReduction) else None


def reduced_vlms(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are given fewer tokens now."""
    return [module for module in model.modules() if vlm_reduction_of(module) is not None]


class MergedImage(NamedTuple):
    """The tokens (K, D) of an image or tile, and the group of each output (M,) of the connector, -1 if dropped.

    The labels are None if nothing merged.
    """

    tokens: Tensor
    labels: Tensor | None


def merge_images(
    reduction: VLMReduction,
    images: Sequence[Tensor],
    grids: Sequence[Grid] | None,
    training: bool,
    traces: Sequence[Trace],
) -> list[MergedImage]:
    """Merge the connector's outputs (M, D) of each image; those of one size together, as one pass of the traces."""
    alike: dict[tuple[int, Grid | None], list[int]] = {}
    for index, tokens in enumerate(images):
        alike.setdefault((len(tokens), None if grids is None else grids[index]), []).append(index)
    done: dict[int, MergedImage] = {}
    for (_, grid), indices in alike.items():
        merged, outcome = reduction.merge(torch.stack([images[index] for index in indices]), grid, training)
        for row, index in enumerate(indices):
            done[index] = MergedImage(merged[row], None if outcome is None else outcome.grouping.labels[row])
        for trace in traces:
            trace.record([] if outcome is None else [Step(0, outcome, outcome.grouping)])
    return [done[index] for index in range(len(images))]
