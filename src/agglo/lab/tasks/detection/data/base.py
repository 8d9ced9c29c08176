"""The data sets for detection: images by index, each with its objects."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from agglo.lab.tasks.detection.data.masks import Mask

Target = dict[str, Any]
Transform = Callable[[Any, Target], tuple[Any, Target]]


class DetectionData(Dataset[tuple[Any, Target]], ABC):
    """One split of a data set: [i] -> transform(PIL RGB image, target).

    A target has boxes (n, 4) xyxy float32, labels (n,) int64 from 0, masks (n, H, W) uint8, image_id, and original_size
    (height, width). Boxes and masks are tv_tensors, so that torchvision's transforms move them with the image.

    Attributes:
        name, description: For messages.
        classes, category_ids: Names of the classes, which labels count from 0, and their ids in COCO results.
        image_ids: The id of each image, in order.
    """

    remarks: Sequence[str] = ()

    def __init__(self, name: str, description: str, classes: Sequence[str], category_ids: Sequence[int]) -> None:
        self.name, self.description = name, description
        self.classes, self.category_ids = list(classes), list(category_ids)
        self.image_ids: list[int] = []
        self.transform: Transform | None = None
        self.annotated = True

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Any, Target]:
        image, target = self.read(range(len(self))[index])  # IndexError ends a loop, and -1 is the last image
        return (image, target) if self.transform is None else self.transform(image, target)

    @abstractmethod
    def read(self, index: int) -> tuple[Any, Target]:
        """Return an image and its target, not transformed."""

    @property
    @abstractmethod
    def ground_truth(self) -> dict[str, Any]:
        """Images, annotations and categories as COCO's evaluation takes them, crowds included."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short hash of images and objects, the same on any machine."""

    def prepared(self, transform: Transform | None, *, annotated: bool = True) -> DetectionData:
        """Return the same images through another transform; annotated=False leaves out boxes, labels and masks."""
        other = copy.copy(self)
        other.transform, other.annotated = transform, annotated
        return other


def target_of(
    boxes: Sequence[Sequence[float]], labels: Sequence[int], masks: Mask, image_id: int, size: tuple[int, int]
) -> Target:
    """Return a target of boxes xyxy, labels and masks (n, H, W) in an image of size (height, width)."""
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {
        "boxes": tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "masks": tv_tensors.Mask(torch.from_numpy(masks)),
        "image_id": image_id,
        "original_size": size,
    }


def collate(batch: Sequence[tuple[Any, Target]]) -> tuple[list[Any], list[Target]]:
    """Return a batch as a detector takes it: images of different sizes stay a list."""
    images, targets = zip(*batch, strict=True)
    return list(images), list(targets)
