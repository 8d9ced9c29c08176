"""What is overridden in a vision-language model that is given fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from agglo.hosts.swap import ReducedModule, begins_pass, signed_as
from agglo.hosts.vlm.outlet import Outlet, Picture, merge_pictures
from agglo.methods import Grid
from agglo.tracing import traces_of


class ReducedFeatures(ReducedModule):
    """The features of pictures come merged."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "agglo_original" in vars(cls):  # not for classes that others make of this one
            # `generate` looks at its signature for what to hand it.
            original = cls.agglo_original.get_image_features  # type: ignore[attr-defined]
            cls.get_image_features = signed_as(original, cls.get_image_features)  # type: ignore[method-assign]

    @begins_pass
    def get_image_features(self: Any, outlet: Outlet, *args: Any, **kwargs: Any) -> Any:
        return as_asked(self, merged_features(self, outlet, None, *args, **kwargs)[0], kwargs)


class ReducedVLM(ReducedFeatures):
    """A prompt with another number of placeholders is told why it is wrong."""

    @begins_pass
    def get_placeholder_mask(self: Any, outlet: Outlet, *args: Any, **kwargs: Any) -> Any:
        return told_why(self, outlet, outlet.owner.get_placeholder_mask, *args, **kwargs)  # type: ignore[attr-defined]


class ReducedInputsMerger(ReducedFeatures):
    """The same for models that look for placeholders in `inputs_merger`."""

    @begins_pass
    def inputs_merger(self: Any, outlet: Outlet, *args: Any, **kwargs: Any) -> Any:
        return told_why(self, outlet, outlet.owner.inputs_merger, *args, **kwargs)  # type: ignore[attr-defined]


def merged_features(
    model: Any, outlet: Outlet, grids: list[Grid] | None, *args: Any, **kwargs: Any
) -> tuple[Any, list[Picture]]:
    """What the model's own `get_image_features` gives, its `pooler_output` merged in the shape it has; and the pictures
    one by one, unless the tower has merged them already."""
    kwargs = {**kwargs, "return_dict": True}
    if outlet.shrink is not None and outlet.count() != outlet.dense:
        args, kwargs = outlet.shrink(isqrt(outlet.count()), args, kwargs)
    outputs = outlet.owner.get_image_features(model, *args, **kwargs)  # type: ignore[attr-defined]
    pictures: list[Picture] = []
    if outlet.handed_on is None and outlet.shrink is None:
        given = outputs.pooler_output
        tensors = [given] if isinstance(given, Tensor) else list(given)
        single = [_pictures(tensor, outlet.dense) for tensor in tensors]
        every = [each for part in single for each in part]
        # A tower that runs reduced has reported its own pass.
        traces = traces_of(model) if outlet.tower_method is None else ()
        pictures = merge_pictures(outlet, every, grids, model.training, traces)
        rest = iter(pictures)
        joined = [torch.stack([next(rest).tokens for _ in part]) if part else tensor
                  for part, tensor in zip(single, tensors, strict=True)]  # fmt: skip
        if isinstance(given, Tensor):
            outputs.pooler_output = joined[0]
        else:
            outputs.pooler_output = type(given)(part.flatten(0, -2) for part in joined)
    return outputs, pictures


def as_asked(model: Any, outputs: Any, options: dict[str, Any]) -> Any:
    """The outputs, or a tuple of them: what transformers' decorators do around a function."""
    wanted = options.get("return_dict")
    wanted = getattr(model.config, "return_dict", True) if wanted is None else wanted
    return outputs if wanted else outputs.to_tuple()


def _pictures(tensor: Tensor, dense: int | None) -> list[Tensor]:
    """The pictures (M, D) in a batch (B, M, D) of them, or in one behind the other (B M, D)."""
    if tensor.dim() == 3:
        return list(tensor)
    return list(tensor.split(len(tensor) if dense is None else dense)) if len(tensor) else []


def told_why(model: Any, outlet: Outlet, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the model's own function that looks for placeholders; where it finds another number, say what helps."""
    try:
        return original(model, *args, **kwargs)
    except (ValueError, RuntimeError) as error:
        if torch.compiler.is_compiling() or "do not match" not in str(error):
            raise
        dense = "as many as without reduction" if outlet.dense is None else str(outlet.dense)
        each = "fewer" if outlet.dense is None else str(outlet.count())
        raise ValueError(
            f"the prompt's placeholders and the pictures' tokens do not match ({error}). Reduced by agglo, a picture "
            f"takes {each} placeholders, not {dense}: call agglo.adapt_processor(processor, model) before preparing "
            "prompts, and again after every other agglo.apply or agglo.remove"
        ) from error
