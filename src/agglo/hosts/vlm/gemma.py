"""PaliGemma, whose connector is one linear layer, and Gemma 3, whose connector averages squares of patches first."""

from __future__ import annotations

from typing import Any, ClassVar

from agglo.hosts.vlm.family import Family, side_of
from agglo.hosts.vlm.outlet import Shrink
from agglo.hosts.vlm.shrinking import SmallerPictures


class PaliGemma(Family):
    model_classes: ClassVar[tuple[str, ...]] = ("PaliGemmaModel",)
    processor_classes: ClassVar[tuple[str, ...]] = ("PaliGemmaProcessor",)
    pointwise: ClassVar[bool] = True

    def dense(self, model: Any) -> int | None:
        vision = model.config.vision_config
        return side_of(vision.image_size, vision.patch_size) ** 2

    def shrink(self, model: Any) -> Shrink:
        return SmallerPictures(model.config.vision_config.patch_size, (("interpolate_pos_encoding", True),))


class Gemma3(Family):
    """Its processor writes one token for a picture and another for each of its tokens."""

    model_classes: ClassVar[tuple[str, ...]] = ("Gemma3Model",)
    processor_classes: ClassVar[tuple[str, ...]] = ("Gemma3Processor",)

    def dense(self, model: Any) -> int | None:
        return int(model.multi_modal_projector.tokens_per_side) ** 2

    def patches_per_token(self, model: Any) -> int:
        return int(model.multi_modal_projector.kernel_size) ** 2

    def placeholder(self, processor: Any) -> str:
        return str(processor.tokenizer.image_token)
