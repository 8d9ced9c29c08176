"""The classifier of the page: the one that comes with agglo, or a visitor's own, of any host that has a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agglo.classification.evaluation.pictures import class_names, prepared
from agglo.embedded import classifier as embedded
from agglo.experiments.checkpoints import load_exactly, read_checkpoint
from agglo.experiments.models import ModelSpec, build

if TYPE_CHECKING:
    from PIL.Image import Image

TORCHVISION = "torchvision/"
EMBEDDED = ModelSpec(embedded.NAME, pretrained=True)


@dataclass
class Classifier:
    """model: called with inputs (B, C, H, W), it gives logits, or what holds them. name: of the architecture.
    classes: what answers are called; None for a model without a head."""

    model: nn.Module
    name: str
    classes: Sequence[str] | None

    def prepare(self, image: Image) -> tuple[Tensor, Tensor]:
        """As the model takes it, (1, C, H, W), and what it then sees of it, (1, 3, H, W): bytes, or floats in 0..1."""
        inputs, seen = prepared(self.model, [image])
        return inputs.to(next(self.model.parameters()).device), seen

    def logits(self, answer: Any) -> Tensor:
        """The logits (1, classes) in what the model gave."""
        found: Tensor = getattr(answer, "logits", answer)
        return found


class _Transformers(Classifier):
    """From a folder that `save_pretrained` wrote, with its image processor."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
        names = model.config.id2label
        super().__init__(model, folder.name, [str(names[number]) for number in range(len(names))])
        self._processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)

    def prepare(self, image: Image) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        inputs = self._processor(image, return_tensors="pt")["pixel_values"]
        seen = self._processor(image, return_tensors="pt", do_normalize=False)["pixel_values"]
        return inputs.to(device), seen.float().clamp(0, 1)


class _Torchvision(Classifier):
    """By its name in torchvision, with weights from a file."""

    def __init__(self, name: str, checkpoint: Path | None) -> None:
        from torchvision import models

        if name not in models.list_models():
            raise ValueError(f"model={TORCHVISION + name!r} is not known to torchvision; it has such as 'vit_b_16'")
        published = models.get_model_weights(name)["IMAGENET1K_V1"]
        model = models.get_model(name, weights=None)
        if checkpoint is not None:
            load_exactly(model, read_checkpoint(checkpoint), str(checkpoint))
        super().__init__(model.eval(), name, published.meta["categories"])
        self._preset = published.transforms()

    def prepare(self, image: Image) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self._preset.mean, self._preset.std))
        inputs = self._preset(image)
        return inputs[None].to(next(self.model.parameters()).device), (inputs * std + mean).clamp(0, 1)[None]


def open_classifier(spec: ModelSpec, device: str = "cpu") -> Classifier:
    """A timm model by its name, a torchvision one as "torchvision/vit_b_16", or the folder of one of transformers."""
    folder = Path(spec.name)
    if folder.is_dir():
        if spec.checkpoint is not None:
            raise ValueError(f"checkpoint={str(spec.checkpoint)!r}: the folder {spec.name!r} has its own weights")
        found: Classifier = _Transformers(folder)
    elif spec.name.startswith(TORCHVISION):
        found = _Torchvision(spec.name.removeprefix(TORCHVISION), spec.checkpoint)
    else:
        model = build(spec)
        found = Classifier(model, spec.name, class_names(model))
    found.model.to(device)
    return found
