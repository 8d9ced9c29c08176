"""The overrides of a vision-language model that is given fewer tokens."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from torch import Tensor

from agglo.hosts.common.swap import ReducedModule, begins_pass
from agglo.hosts.vlm.reduction import MergedImage, VLMReduction, merge_images
from agglo.methods import Grid
from agglo.tracing import traces_of


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
    rest = (image.tokens for image in merged)
    pairs = zip(parts, tensors, strict=True)
    joined = [torch.stack([next(rest) for _ in part]) if part else tensor for part, tensor in pairs]
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


def explain_placeholder_mismatch(model: Any, reduction: VLMReduction, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the model's own method that looks for placeholders; where it finds another number, say what to do."""
    try:
        return getattr(reduction.owner, name)(model, *args, **kwargs)
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
