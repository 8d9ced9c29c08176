"""torchvision's classifiers: `torchvision:vit_b_16`, or with a tag of weights `torchvision:vit_b_16:IMAGENET1K_V1`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from agglo.checks import choice
from agglo.models.checkpoints import Checkpoint
from agglo.models.inputs import Inputs, crop_of
from agglo.models.libraries.base import Known, Library, ModelSpec, class_count, load, remember, set_classes

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of all its classifiers but SWAG's


class Torchvision(Library):
    prefix: ClassVar[str] = "torchvision:"
    package: ClassVar[str] = "torchvision"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        from torchvision import models

        self.refuse_options(spec.options, "torchvision")
        name, _, tag = name.partition(":")
        choice("torchvision's classifier", name, models.list_models(module=models))
        published = models.get_model_weights(name)
        weights = published[choice(f"{name}: weights", tag, published.__members__)] if tag else published.DEFAULT
        preset = weights.transforms()
        side, resized = preset.crop_size[0], preset.resize_size[0]
        how = preset.interpolation.value
        inputs = Inputs((side, side), tuple(preset.mean), tuple(preset.std), how, crop_of(side, resized))
        self.require_size(spec, inputs)
        options: dict[str, Any] = {"weights": weights if spec.takes_own_weights else None}
        if not spec.takes_own_weights and name.startswith("vit_"):
            options["image_size"] = side
        if not spec.takes_own_weights and (classes := spec.classes(checkpoint)) is not None:
            options["num_classes"] = classes
        model: nn.Module = models.get_model(name, **options)
        if checkpoint is not None:
            load(model, checkpoint.model, spec)
        if spec.num_classes is not None and spec.num_classes != class_count(model):
            set_classes(model, spec.num_classes)
        categories = tuple(weights.meta["categories"])
        return remember(model, Known(inputs, categories, len(categories) if spec.takes_own_weights else None))

    def inputs(self, model: Any) -> Inputs:
        side = int(getattr(model, "image_size", 224))  # an object does not say which weights it has
        return Inputs((side, side), _MEAN, _STD, "bilinear")
