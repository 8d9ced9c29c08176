"""The classifier of the page: the one that comes with agglo, or a visitor's own, of any library agglo knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from agglo.classification.evaluation.pictures import prepared, with_class_names
from agglo.embedded import classifier as embedded
from agglo.experiments.libraries import class_names
from agglo.experiments.models import ModelSpec, build

if TYPE_CHECKING:
    from PIL.Image import Image

EMBEDDED = ModelSpec(embedded.NAME, pretrained=True)


@dataclass(frozen=True)
class Classifier:
    """model: called with inputs (B, C, H, W), it gives logits, or what holds them.
    classes: what answers are called; None for a model without a head."""

    model: nn.Module
    classes: Sequence[str] | None

    def prepare(self, image: Image) -> tuple[Tensor, Tensor]:
        """As the model takes it, (1, C, H, W), and what it then sees of it, (1, 3, H, W) bytes."""
        inputs, seen = prepared(self.model, [image])
        return inputs.to(next(self.model.parameters()).device), seen


def open_classifier(spec: ModelSpec, device: str = "cpu") -> Classifier:
    """A model as every command names it (`agglo.experiments.models`). Prompts without class names are of ImageNet's."""
    model = build(with_class_names(spec)).to(device)
    return Classifier(model, class_names(model))
