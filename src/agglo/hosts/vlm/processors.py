"""Processors that write as many placeholders as a reduced model gives tokens."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from agglo.hosts.common.swap import ReducedModule, reduced_class
from agglo.hosts.vlm.families import Family, find
from agglo.hosts.vlm.reduction import VLMReduction, vlm_reduction_of
from agglo.methods import Grid


@dataclass(frozen=True)
class Placeholders:
    """The number of placeholders that stay in a text."""

    family: Family
    reduction: VLMReduction

    def count(self, dense: int, grid: Grid | None = None) -> int:
        """Return the number in place of so many placeholders one behind the other, perhaps of several tiles."""
        each = self.reduction.dense
        if each is None:
            return self.reduction.count(dense, grid)
        if dense % each:
            raise ValueError(
                f"the processor writes {dense} placeholders one behind the other, and an image of this model takes "
                f"{each}: they are not made for each other"
            )
        return dense // each * self.reduction.count()

    def shorten(self, processor: Any, text: str, grid: Grid | None = None) -> str:
        placeholder = self.family.placeholder(processor)

        def fewer(run: re.Match[str]) -> str:
            return placeholder * self.count(len(run.group()) // len(placeholder), grid)

        return re.sub(f"(?:{re.escape(placeholder)})+", fewer, text)


class AdaptedProcessor(ReducedModule):
    """The overrides of a processor of transformers."""

    agglo_placeholders: Placeholders

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(vars(cls).get("agglo_original"), "_get_num_multimodal_tokens"):  # which not every processor has
            cls._get_num_multimodal_tokens = _count_tokens  # type: ignore[attr-defined]

    def replace_image_token(self: Any, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        placeholders: Placeholders = self.agglo_placeholders
        text = self.agglo_original.replace_image_token(self, image_inputs, image_idx, **kwargs)
        return placeholders.shorten(self, text, placeholders.family.grid(self, image_inputs, image_idx))

    def replace_video_token(self: Any, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        # Some models take the frames of a video for images.
        text = self.agglo_original.replace_video_token(self, video_inputs, video_idx, **kwargs)
        return self.agglo_placeholders.shorten(self, text)

    def to_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the processor as it was, which is what is saved."""
        plain: dict[str, Any] = restored(copy.copy(self)).to_dict(*args, **kwargs)
        return plain


def _count_tokens(self: Any, image_sizes: Any = None, **kwargs: Any) -> Any:
    """Override `_get_num_multimodal_tokens`, which serving engines call before they see an image."""
    data = self.agglo_original._get_num_multimodal_tokens(self, image_sizes=image_sizes, **kwargs)
    if image_sizes is not None:
        placeholders: Placeholders = self.agglo_placeholders
        each = placeholders.reduction.dense
        data.num_image_tokens = [
            placeholders.count(tokens) if each is None else tokens - tiles * (each - placeholders.reduction.count())
            for tokens, tiles in zip(data.num_image_tokens, data.num_image_patches, strict=True)
        ]
    return data


def adapted(processor: Any, model: nn.Module) -> Any:
    """Let a processor write as many placeholders as the model, reduced or not, gives tokens."""
    module, family = find(model, "merged")
    if not family.fits(processor):
        raise ValueError(
            f"{type(processor).__name__} is no processor of {type(module).__name__} that agglo can adapt; "
            f"accepted: {', '.join(family.processors)}"
        )
    reduction = vlm_reduction_of(module)
    restored(processor)
    if reduction is not None:
        processor.agglo_placeholders = Placeholders(family, reduction)
        processor.__class__ = reduced_class(AdaptedProcessor, type(processor))
    return processor


def restored(processor: Any) -> Any:
    """Return a processor to the state in which its library made it."""
    if isinstance(processor, AdaptedProcessor):
        changed: Any = processor
        changed.__class__ = changed.agglo_original
        del changed.agglo_placeholders
    return processor
