"""The classifier of the page: the one that comes with agglo, or a visitor's own, of any library agglo knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from agglo.classification.evaluation.pictures import dataset_of, prepared, with_class_names
from agglo.embedded import classifier as embedded
from agglo.experiments.libraries import class_names
from agglo.experiments.models import ModelSpec, build
from agglo.patching import apply, reduction, remove

if TYPE_CHECKING:
    from PIL.Image import Image

EMBEDDED = ModelSpec(embedded.NAME, pretrained=True)


@dataclass(frozen=True)
class Classifier:
    """model: called with inputs (B, C, H, W), it gives logits, or what holds them.
    classes: what answers are called; None for a model without a head.
    dataset: whose pictures it is made for, which says how a picture is cropped; None is any."""

    model: nn.Module
    classes: Sequence[str] | None
    dataset: str | None

    @cached_property
    def size(self) -> tuple[int, float]:
        """Patch tokens and GFLOPs of the dense model, which it is afterwards."""
        apply(self.model, "atc", keep_rate=1.0)
        found = reduction(self.model)
        remove(self.model)
        assert found is not None
        return found.n_tokens, found.gflops_before

    def prepare(self, image: Image) -> tuple[Tensor, Tensor]:
        """As the model takes it, (1, C, H, W), and what it then sees of it, (1, 3, H, W) bytes."""
        inputs, seen = prepared(self.model, [image], self.dataset)
        return inputs.to(next(self.model.parameters()).device), seen


def open_classifier(spec: ModelSpec, device: str = "cpu") -> Classifier:
    """A model as every command names it (`agglo.experiments.models`). Prompts without class names are of ImageNet's."""
    model = build(with_class_names(spec)).to(device)
    return Classifier(model, class_names(model), dataset_of(spec))
