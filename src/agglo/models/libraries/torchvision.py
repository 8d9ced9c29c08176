"""torchvision's classifiers: `torchvision:vit_b_16`, or with a tag of weights `torchvision:vit_b_16:IMAGENET1K_V1`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from agglo.models.checkpoints import Checkpoint, load_exactly
from agglo.models.inputs import Inputs, crop_of
from agglo.models.libraries.base import (
    Known,
    Library,
    ModelSpec,
    one_size,
    refuse_option,
    remember,
    require_name,
    require_tag,
    with_own_head,
)
from agglo.models.libraries.heads import class_count, set_classes

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of all its classifiers but SWAG's


class Torchvision(Library):
    prefixes: ClassVar[tuple[str, ...]] = ("torchvision:",)
    accepts: ClassVar[str] = "torchvision:vit_b_16, torchvision:vit_b_16:IMAGENET1K_SWAG_E2E_V1"
    package: ClassVar[str] = "torchvision"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        from torchvision import models

        for option, value in spec.options.items():
            refuse_option(option, value, "torchvision")
        name, _, tag = name.partition(":")
        names = models.list_models(module=models)
        require_name(spec, name, names, "is no classifier of torchvision", "torchvision.models.list_models()")
        published = models.get_model_weights(name)
        require_tag(spec, name, tag, published.__members__)
        weights = published[tag] if tag else published.DEFAULT
        model = self._built(name, weights, spec, checkpoint)
        inputs = _inputs_of(weights)
        inputs = inputs if spec.image_size is None else replace(inputs, image_size=spec.image_size)
        categories = tuple(weights.meta["categories"])
        return remember(model, Known(inputs, categories, len(categories) if spec.takes_own_weights else None))

    def _built(self, name: str, weights: Any, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        from torchvision import models

        if spec.takes_own_weights:
            model: nn.Module = models.get_model(name, weights=weights)
        else:
            # At the size of the weights it goes by, and resampled afterwards.
            options = {"image_size": _inputs_of(weights).image_size[0]} if _is_vit(name) else {}
            classes = spec.num_classes or (None if checkpoint is None or spec.new_head else checkpoint.head_classes)
            options |= {} if classes is None else {"num_classes": classes}
            model = models.get_model(name, weights=None, **options)
        if checkpoint is not None:
            state = with_own_head(model, checkpoint.model) if spec.new_head else checkpoint.model
            load_exactly(model, state, str(spec.checkpoint))
        if spec.num_classes is not None and spec.num_classes != class_count(model):
            set_classes(model, spec.num_classes)
        return model if spec.image_size is None else _resized(name, model, one_size(spec.image_size, "torchvision"))

    def brings_weights(self, name: str) -> bool:
        return ":" in name

    def inputs(self, model: Any) -> Inputs:
        side = int(getattr(model, "image_size", 224))  # an object does not say which weights it has
        return Inputs((side, side), _MEAN, _STD, "bilinear")


def _is_vit(name: str) -> bool:
    return name.startswith("vit_")


def _inputs_of(weights: Any) -> Inputs:
    """Return what the transform of the weights does."""
    preset = weights.transforms()
    side, resized = preset.crop_size[0], preset.resize_size[0]
    return Inputs(
        (side, side), tuple(preset.mean), tuple(preset.std), preset.interpolation.value, crop_of(side, resized)
    )


def _resized(name: str, model: nn.Module, side: int) -> nn.Module:
    """Return a vision transformer for another image size, its position embeddings resampled by torchvision.

    Convolutional models take any size.
    """
    from torchvision import models
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    if not isinstance(model, VisionTransformer):
        return model
    if side % model.patch_size:
        raise ValueError(f"image_size={side} must be a multiple of the patch size {model.patch_size}")
    state = interpolate_embeddings(side, model.patch_size, OrderedDict(model.state_dict()))
    other: nn.Module = models.get_model(name, weights=None, image_size=side, num_classes=class_count(model))
    other.load_state_dict(state)
    return other
