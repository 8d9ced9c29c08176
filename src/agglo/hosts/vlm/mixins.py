"""The overrides of a vision-language model that is given fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from agglo.hosts.common.swap import ReducedModule, begins_pass, signed_as
from agglo.hosts.vlm.reduction import MergedImage, VLMReduction, merge_images
from agglo.methods import Grid
from agglo.tracing import traces_of


class ReducedFeatures(ReducedModule):
    """A model whose image features come merged."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "agglo_original" in vars(cls):  # not for classes that others make of this one
            # `generate` looks at its signature for what to hand it.
            original = cls.agglo_original.get_image_features  # type: ignore[attr-defined]
            cls.get_image_features = signed_as(original, cls.get_image_features)  # type: ignore[method-assign]

    @begins_pass
    def get_image_features(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        return as_asked(self, merged_features(self, reduction, None, *args, **kwargs)[0], kwargs)


class ReducedVLM(ReducedFeatures):
    """A model that looks for placeholders in `get_placeholder_mask`."""

    @begins_pass
    def get_placeholder_mask(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        return explain_placeholder_mismatch(self, reduction, reduction.owner.get_placeholder_mask, *args, **kwargs)  # type: ignore[attr-defined]


class ReducedInputsMerger(ReducedFeatures):
    """A model that looks for placeholders in `inputs_merger`."""

    @begins_pass
    def inputs_merger(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        return explain_placeholder_mismatch(self, reduction, reduction.owner.inputs_merger, *args, **kwargs)  # type: ignore[attr-defined]


def merged_features(
    model: Any, reduction: VLMReduction, grids: list[Grid] | None, *args: Any, **kwargs: Any
) -> tuple[Any, list[MergedImage]]:
    """Call the model's own `get_image_features` and merge its `pooler_output`, in the shape it has.

    Also returns the images one by one, unless the tower has merged them already.
    """
    kwargs = {**kwargs, "return_dict": True}
    if reduction.shrink is not None and reduction.count() != reduction.dense:
        args, kwargs = reduction.shrink(isqrt(reduction.count()), args, kwargs)
    outputs = reduction.owner.get_image_features(model, *args, **kwargs)  # type: ignore[attr-defined]
    if reduction.handed_on is not None or reduction.shrink is not None:
        return outputs, []
    given = outputs.pooler_output
    tensors = [given] if isinstance(given, Tensor) else list(given)
    parts = [_images(tensor, reduction.dense) for tensor in tensors]
    # A tower that runs reduced has reported its own pass.
    traces = traces_of(model) if reduction.tower_method is None else ()
    merged = merge_images(reduction, [each for part in parts for each in part], grids, model.training, traces)
    rest = iter(merged)
    joined = []
    for part, tensor in zip(parts, tensors, strict=True):
        joined.append(torch.stack([next(rest).tokens for _ in part]) if part else tensor)
    if isinstance(given, Tensor):
        outputs.pooler_output = joined[0]
    else:
        outputs.pooler_output = type(given)(part.flatten(0, -2) for part in joined)
    return outputs, merged


def as_asked(model: Any, outputs: Any, options: dict[str, Any]) -> Any:
    """Return the outputs, or a tuple of them, as transformers' decorators do."""
    wanted = options.get("return_dict")
    wanted = getattr(model.config, "return_dict", True) if wanted is None else wanted
    return outputs if wanted else outputs.to_tuple()


def _images(tensor: Tensor, dense: int | None) -> list[Tensor]:
    """Split a batch (B, M, D), or images one behind the other (B M, D), into images (M, D)."""
    if tensor.dim() == 3:
        return list(tensor)
    return list(tensor.split(len(tensor) if dense is None else dense)) if len(tensor) else []


def explain_placeholder_mismatch(
    model: Any, reduction: VLMReduction, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call the model's own function that looks for placeholders; where it finds another number, say what to do."""
    try:
        return original(model, *args, **kwargs)
    except (ValueError, RuntimeError) as error:
        if torch.compiler.is_compiling() or "do not match" not in str(error):
            raise
        dense = "as many as without reduction" if reduction.dense is None else str(reduction.dense)
        each = "fewer" if reduction.dense is None else str(reduction.count())
        raise ValueError(
            f"the prompt's placeholders and the images' tokens do not match ({error}). Reduced by agglo, an image "
            f"takes {each} placeholders, not {dense}: call agglo.adapt_processor(processor, model) before preparing "
            "prompts, and again after every other agglo.apply or agglo.remove"
        ) from error
