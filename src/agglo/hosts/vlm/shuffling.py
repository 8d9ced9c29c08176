"""InternVL, Idefics 3 and SmolVLM: the connector puts the channels of a square of patches into one token."""

from __future__ import annotations

from typing import Any, ClassVar

from agglo.hosts.swap import ReducedModule
from agglo.hosts.vlm.family import Family, side_of
from agglo.hosts.vlm.mixin import ReducedInputsMerger, ReducedVLM
from agglo.hosts.vlm.outlet import Shrink
from agglo.hosts.vlm.shrinking import SmallerPictures


class InternVL(Family):
    """A picture is cut into tiles, each of as many tokens."""

    model_classes: ClassVar[tuple[str, ...]] = ("InternVLModel",)
    processor_classes: ClassVar[tuple[str, ...]] = ("InternVLProcessor",)

    def dense(self, model: Any) -> int | None:
        vision = model.config.vision_config
        return side_of(vision.image_size, vision.patch_size) ** 2 // self.patches_per_token(model)

    def patches_per_token(self, model: Any) -> int:
        return int(1 / model.config.downsample_ratio) ** 2

    def shrink(self, model: Any) -> Shrink:
        return SmallerPictures(_patch(model) * int(1 / model.config.downsample_ratio))


class Idefics3(Family):
    """A picture is cut into tiles, each of as many tokens, and shown once more as a whole."""

    model_classes: ClassVar[tuple[str, ...]] = ("Idefics3Model",)
    processor_classes: ClassVar[tuple[str, ...]] = ("Idefics3Processor",)
    mixin: ClassVar[type[ReducedModule]] = ReducedInputsMerger

    def dense(self, model: Any) -> int | None:
        return int(model.image_seq_len)

    def patches_per_token(self, model: Any) -> int:
        return int(model.config.scale_factor) ** 2

    def shrink(self, model: Any) -> Shrink:
        return SmallerPictures(_patch(model) * int(model.config.scale_factor))


class SmolVLM(Idefics3):
    """Built alike."""

    model_classes: ClassVar[tuple[str, ...]] = ("SmolVLMModel",)
    processor_classes: ClassVar[tuple[str, ...]] = ("SmolVLMProcessor",)
    mixin: ClassVar[type[ReducedModule]] = ReducedVLM


def _patch(model: Any) -> int:
    """Pixels along the side of a patch."""
    size = model.config.vision_config.patch_size
    return int(size if isinstance(size, int) else size[0])
