"""What `agglo.apply` puts into a vision-language model that is given fewer tokens, and the overrides that do it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.hosts.common.base import Host, Layout
from agglo.hosts.common.swap import ReducedModule, Setting, UnsupportedModelError, begins_pass, original_class
from agglo.methods import Grid, Method, View
from agglo.methods.base import square
from agglo.methods.baselines import Pooling
from agglo.plan import Plan
from agglo.tracing import Step, traces_of

if TYPE_CHECKING:
    from agglo.hosts.vlm.families import Family


class SmallerImages(NamedTuple):
    """The baseline of merging: images are scaled down before the tower."""

    pixels: int  # along the side of one token
    interpolate_positions: bool  # whether the tower must be asked to interpolate its position embeddings

    def scale(self, side: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of `get_image_features` with `side` tokens along the side of an image."""
        size = (side * self.pixels, side * self.pixels)
        more: dict[str, Any] = {"interpolate_pos_encoding": True} if self.interpolate_positions else {}
        mask = given.get("pixel_attention_mask")
        if mask is not None:
            more["pixel_attention_mask"] = _scaled(mask.float(), size, "nearest").to(mask.dtype)
        return {**given, **more, "pixel_values": _scaled(given["pixel_values"], size, "bicubic")}


def _scaled(images: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    flat = images.reshape(-1, 1, *images.shape[-2:])
    return F.interpolate(flat, size, mode=mode, antialias=mode == "bicubic").reshape(*images.shape[:-2], *size)


@dataclass(frozen=True)
class VLMReduction(Setting):
    """What `agglo.apply` put into a vision-language model that is given fewer tokens."""

    config: ReductionConfig
    dense: int | None  # tokens that an image takes without reduction; None where images differ in size
    plan: Plan  # of the tower, or of the merge after it, which then counts as a model of one block
    depth: int  # its number of blocks
    # Tokens that an image takes where the tower's groups pass a pointwise connector; None where its outputs are merged.
    handed_on: int | None = None
    method: Method | None = None  # that merges these
    tower_method: Method | None = None  # None where the tower runs whole
    patches_per_token: int = 1  # of the tower, that the connector makes one token of
    shrink: SmallerImages | None = None  # in place of merging; the method then says how many tokens are left

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible request, where the model says how many tokens it makes."""
        if self.dense is not None:
            self.count(strict=True)

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
            raise ValueError("how many tokens an image takes depends on its size: say agglo.image_tokens(model, 256)")
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
                f"{self.plan.schedule!r} leaves {left} of {patches} patches, too few for one of {dense} tokens"
            )
        asked = asked if strict else max(asked, self.method.least(dense))
        return dense if asked >= dense else self.method.stages(dense, [asked], grid)[0]


def vlm_reduction_of(module: nn.Module) -> VLMReduction | None:
    applied = getattr(module, "agglo_applied", None)
    return applied if isinstance(applied, VLMReduction) else None


def reduced_vlms(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are given fewer tokens now."""
    return [module for module in model.modules() if vlm_reduction_of(module) is not None]


def late_reduction(model: nn.Module, family: Family, config: ReductionConfig, method: Method) -> VLMReduction:
    """Return the reduction of a model whose tower runs whole.

    The connector's outputs are merged once, or the image is made smaller.
    """
    rate = config.keep_rate
    schedule = config.schedule if rate is None else method.schedule(rate, None)
    plan = Plan(schedule, config.threshold, proportional=False)
    _require_known_count(method, plan)
    shrink = family.shrink(model) if config.output == "smaller_image" else None
    by, each = _at_connector(method) if shrink is None else Pooling(), family.side(model) ** 2
    return VLMReduction(config, family.dense(model), plan, 1, None, by, None, each, shrink)


def tower_reduction(
    model: nn.Module, family: Family, layout: Layout, plan: Plan, config: ReductionConfig, method: Method, host: Host
) -> tuple[Plan, VLMReduction]:
    """Return the plan of the tower, and the reduction of a model whose tower runs reduced.

    The tower's groups pass a pointwise connector; the outputs of others are merged to the same fraction.
    """
    _require_known_count(method, plan)
    dense = family.dense(model)
    if not family.pointwise:
        by, each = _at_connector(method), family.side(model) ** 2
        return plan, VLMReduction(config, dense, plan, layout.depth, None, by, method, each)
    if not host.may_stay_merged:
        raise UnsupportedModelError(
            f"the tower of this {type(model).__name__}, none of transformers' own, cannot hand on merged tokens: use "
            "output='merged_late'"
        )
    plan = replace(plan, merged=True, read_blocks=family.read_blocks(model, layout.depth))
    left = plan.counts(method, layout.patches, layout.depth, layout.grid)[max(plan.read_blocks)]
    handed_on = layout.prefix + left - family.left_out(model)
    return plan, VLMReduction(config, dense, plan, layout.depth, handed_on)


def _at_connector(method: Method) -> Method:
    """Return the method as it merges the connector's outputs: by the tokens themselves, since there are no keys.

    Raises:
        ValueError: The method cannot.
    """
    if isinstance(method, nn.Module):
        raise ValueError(f"{method.name} learns for the tower's tokens, and this model merges the connector's")
    if method.needs_class_attention or method.needs_attention_received:
        raise ValueError(f"{method.name} needs attention weights, and there are none after the connector")
    if method.kind not in ("merges hard", "prunes"):
        raise ValueError(f"{method.name} {method.kind}; the connector's outputs can be merged hard or pruned")
    options = method.options()
    return type(method)(**{**options, "features": "tokens"} if "features" in options else options)


def _require_known_count(method: Method, plan: Plan) -> None:
    """Raise ValueError unless every image keeps the same number of tokens, known before it is seen."""
    if plan.schedule is None:
        raise ValueError(
            f"threshold={plan.threshold!r} leaves another number of tokens of every image, and a prompt needs to know "
            "it: give keep_rate or schedule"
        )
    if method.varies != "no" or method.tokens_return != "never":
        raise ValueError(f"{method.name} leaves a number of tokens that is not known beforehand, and a prompt needs it")


class MergedImage(NamedTuple):
    """An image or tile after the connector."""

    tokens: Tensor  # (K, D)
    labels: Tensor | None  # (M,) the group of each output of the connector, -1 if dropped; None if nothing merged


def merge_images(
    model: nn.Module, reduction: VLMReduction, images: Sequence[Tensor], grids: Sequence[Grid] | None
) -> list[MergedImage]:
    """Merge the connector's outputs (M, D) of each image; those of one size together, as one pass of a trace."""
    # A tower that runs reduced has reported its own pass.
    traces = traces_of(model) if reduction.tower_method is None else ()
    alike: dict[tuple[int, Grid | None], list[int]] = {}
    for index, tokens in enumerate(images):
        alike.setdefault((len(tokens), square(len(tokens)) if grids is None else grids[index]), []).append(index)
    done: dict[int, MergedImage] = {}
    for (n_tokens, grid), indices in alike.items():
        together, steps = torch.stack([images[index] for index in indices]), list[Step]()
        labels: list[Any] = [None] * len(indices)
        target = reduction.count(n_tokens, grid)
        if target < n_tokens:
            assert reduction.method is not None
            outcome = reduction.method.decide(View(together, target=target, grid=grid, training=model.training))
            together, labels = outcome.new_tokens(together), list(outcome.grouping.labels)
            steps.append(Step(0, outcome, outcome.grouping))
        done |= dict(zip(indices, map(MergedImage, together, labels), strict=True))
        for trace in traces:
            trace.record(steps)
    return [done[index] for index in range(len(images))]


class ReducedVLM(ReducedModule):
    """A model whose image features come merged."""

    @begins_pass
    def get_image_features(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        return as_asked(self, merged_features(self, reduction, None, *args, **kwargs)[0], kwargs)

    @begins_pass
    def get_placeholder_mask(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        return explain_placeholder_mismatch(self, reduction, "get_placeholder_mask", *args, **kwargs)

    @begins_pass
    def inputs_merger(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        """Override what Idefics 3 has in place of `get_placeholder_mask`."""
        return explain_placeholder_mismatch(self, reduction, "inputs_merger", *args, **kwargs)


def merged_features(
    model: Any, reduction: VLMReduction, grids: list[Grid] | None, *args: Any, **kwargs: Any
) -> tuple[Any, list[MergedImage]]:
    """Call the model's own `get_image_features` and merge its `pooler_output`, in the shape it has.

    Also returns the images one by one, unless the tower has merged them already.
    """
    original = original_class(model).get_image_features
    names = list(inspect.signature(original).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs, "return_dict": True}
    if reduction.shrink is not None and reduction.count() != reduction.dense:
        given = reduction.shrink.scale(isqrt(reduction.count()), given)
    outputs = original(model, **given)
    if reduction.handed_on is not None or reduction.shrink is not None:
        return outputs, []
    pooled = outputs.pooler_output
    tensors = [pooled] if isinstance(pooled, Tensor) else list(pooled)
    parts = [_images(tensor, reduction.dense) for tensor in tensors]
    merged = merge_images(model, reduction, [each for part in parts for each in part], grids)
    rest = (image.tokens for image in merged)
    pairs = zip(parts, tensors, strict=True)
    joined = [torch.stack([next(rest) for _ in part]) if part else tensor for part, tensor in pairs]
    if isinstance(pooled, Tensor):
        outputs.pooler_output = joined[0]
    else:
        outputs.pooler_output = type(pooled)(part.flatten(0, -2) for part in joined)
    return outputs, merged


def as_asked(model: Any, outputs: Any, options: dict[str, Any]) -> Any:
    """Return the outputs, or a tuple of them, as transformers' decorators do."""
    wanted = options.get("return_dict")
    wanted = getattr(model.config, "return_dict", True) if wanted is None else wanted
    return outputs if wanted else outputs.to_tuple()


def _images(tensor: Tensor, dense: int | None) -> list[Tensor]:
    """Split a batch (B, M, D), or images one behind the other (B M, D), into images (M, D)."""
    return list(tensor if tensor.dim() == 3 or not len(tensor) else tensor.split(dense or len(tensor)))


def explain_placeholder_mismatch(model: Any, reduction: VLMReduction, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the model's own method that looks for placeholders; where it finds another number, say what to do."""
    try:
        return getattr(original_class(model), name)(model, *args, **kwargs)
    except (ValueError, RuntimeError) as error:
        if torch.compiler.is_compiling() or "do not match" not in str(error):
            raise
        each = "another number of" if reduction.dense is None else f"{reduction.count()}, not {reduction.dense},"
        raise ValueError(
            f"the prompt's placeholders and the images' tokens do not match ({error}). Reduced by agglo, an image "
            f"takes {each} placeholders: call agglo.adapt_processor(processor, model) before preparing prompts, and "
            "again after every other agglo.apply or agglo.remove"
        ) from error
