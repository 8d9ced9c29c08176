"""LLaVA and VipLLaVA: an MLP on each token of one layer of the tower, or of several layers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agglo.hosts.swap import UnsupportedModelError
from agglo.hosts.vit.base import Layout
from agglo.hosts.vlm.family import Family, side_of
from agglo.hosts.vlm.outlet import Shrink
from agglo.hosts.vlm.shrinking import SmallerPictures

_PREFIX = {"clip_vision_model": 1, "siglip_vision_model": 0}  # tokens in front of the patches


class Llava(Family):
    """The class token is left out where the configuration says "default"; "full" hands all on."""

    model_classes: ClassVar[tuple[str, ...]] = ("LlavaModel",)
    processor_classes: ClassVar[tuple[str, ...]] = ("LlavaProcessor",)
    pointwise: ClassVar[bool] = True

    def dense(self, model: Any) -> int | None:
        vision = model.config.vision_config
        if vision.model_type == "pixtral":
            raise UnsupportedModelError(
                "a LLaVA with a Pixtral tower puts marks between the rows of a picture, which merged tokens do not have"
            )
        prefix = _PREFIX.get(vision.model_type)
        if prefix is None:  # as many as the processor says
            return None
        return prefix + side_of(vision.image_size, vision.patch_size) ** 2 - self.left_out(model)

    def left_out(self, model: Any) -> int:
        """Tokens in front that the connector does not read."""
        return int(model.config.vision_feature_select_strategy == "default")

    def feature_layers(self, model: Any) -> int | Sequence[int]:
        layers: int | Sequence[int] = model.config.vision_feature_layer
        return layers

    def read_blocks(self, model: Any, depth: int) -> tuple[int, ...]:
        layers = self.feature_layers(model)
        states = [layers] if isinstance(layers, int) else list(layers)
        blocks = tuple(state - 1 if state >= 0 else state + depth for state in states)
        if min(blocks) < 0:
            raise UnsupportedModelError(
                f"vision_feature_layer={layers!r} reads tokens before the first block, where nothing is merged"
            )
        return blocks

    def handed_on(self, model: Any, layout: Layout, left: int) -> int:
        return layout.prefix + left - self.left_out(model)

    def shrink(self, model: Any) -> Shrink:
        return SmallerPictures(model.config.vision_config.patch_size, (("interpolate_pos_encoding", True),))


class VipLlava(Llava):
    """The class token is always left out."""

    model_classes: ClassVar[tuple[str, ...]] = ("VipLlavaModel",)

    def left_out(self, model: Any) -> int:
        return 1

    def feature_layers(self, model: Any) -> int | Sequence[int]:
        layers: int | Sequence[int] = model.config.vision_feature_layers
        return layers
