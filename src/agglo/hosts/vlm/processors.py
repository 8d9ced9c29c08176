"""Processors that write as many placeholders as a reduced model gives tokens."""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn

from agglo.hosts.common.swap import ReducedModule, reduced_class
from agglo.hosts.vlm.families import FAMILIES, Family, find_vlm
from agglo.hosts.vlm.reduction import VLMReduction, vlm_reduction_of
from agglo.methods import Grid


class AdaptedProcessor(ReducedModule):
    """The overrides of a processor of transformers."""

    agglo_reduction: VLMReduction

    def replace_image_token(self: Any, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        text = self.agglo_original.replace_image_token(self, image_inputs, image_idx, **kwargs)
        grid = _family_of(self).grid
        return _shortened(self, text, None if grid is None else grid(self, image_inputs, image_idx))

    def replace_video_token(self: Any, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        # Some models take the frames of a video for images.
        return _shortened(self, self.agglo_original.replace_video_token(self, video_inputs, video_idx, **kwargs))

    def to_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the processor as it was, which is what is saved."""
        return restored(copy.copy(self)).to_dict(*args, **kwargs)


def _family_of(processor: Any) -> Family:
    return next(family for family in FAMILIES if family.has(processor))


def _shortened(processor: Any, text: str, grid: Grid | None = None) -> str:
    """Return a text with as many placeholders as the reduced model gives tokens."""
    reduction: VLMReduction = processor.agglo_reduction
    placeholder = _family_of(processor).placeholder(processor)

    def fewer(run: re.Match[str]) -> str:
        n_written, each = len(run.group()) // len(placeholder), reduction.dense
        if each is None:
            return placeholder * reduction.count(n_written, grid)
        if n_written % each:
            raise ValueError(f"the processor writes {n_written} placeholders for images that take {each} each")
        return placeholder * (n_written // each * reduction.count())  # perhaps of several tiles

    return re.sub(f"(?:{re.escape(placeholder)})+", fewer, text)


def adapted(processor: Any, model: nn.Module) -> Any:
    """Let a processor write as many placeholders as the model, reduced or not, gives tokens."""
    module, family = find_vlm(model, "merged")
    if not family.has(processor):
        raise ValueError(
            f"{type(processor).__name__} is no processor of {type(module).__name__} that agglo can adapt; "
            f"accepted: {', '.join(family.processors)}"
        )
    reduction = vlm_reduction_of(module)
    restored(processor)
    if reduction is not None:
        processor.agglo_reduction = reduction
        processor.__class__ = reduced_class(AdaptedProcessor, type(processor))
    return processor


def restored(processor: Any) -> Any:
    """Return a processor to the state in which its library made it."""
    if isinstance(processor, AdaptedProcessor):
        changed: Any = processor
        changed.__class__ = changed.agglo_original
        del changed.agglo_reduction
    return processor
