"""The data sets for detection: images by index, each with its objects, and masks as COCO files have them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as rle
from numpy.typing import NDArray
from torch.utils.data import Dataset
from torchvision import tv_tensors

Target = dict[str, Any]
Transform = Callable[[Any, Target], tuple[Any, Target]]
Mask = NDArray[np.uint8]


class DetectionData(Dataset[tuple[Any, Target]], ABC):
    """One split of a data set: [i] -> transform(PIL RGB image, target).

    A target has boxes (n, 4) xyxy float32, labels (n,) int64 from 0, masks (n, H, W) uint8, image_id, and original_size
    (height, width). Boxes and masks are tv_tensors, so that torchvision's transforms move them with the image.
    category_ids are the ids of the classes in COCO results.
    """

    image_ids: Sequence[int]
    transform: Transform | None = None
    annotated = True

    def __init__(self, name: str, description: str, classes: Sequence[str], category_ids: Sequence[int]) -> None:
        self.name, self.description = name, description
        self.classes, self.category_ids = list(classes), list(category_ids)

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

    def prepared(self, transform: Transform, *, annotated: bool = True) -> DetectionData:
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


def encode(masks: NDArray[Any]) -> list[dict[str, Any]]:
    """Return masks (n, H, W), nonzero inside, as packed RLEs whose strings JSON can hold."""
    if not len(masks):
        return []
    found = rle.encode(np.asfortranarray(np.moveaxis(masks != 0, 0, -1).astype(np.uint8)))
    return [{"size": list(map(int, one["size"])), "counts": one["counts"].decode("ascii")} for one in found]


def box_and_area(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return the box (x, y, width, height) around a segmentation, and its number of pixels, by COCO's names."""
    packed = rle.segmToRle(segmentation, width, height)
    return {"bbox": [float(value) for value in rle.toBbox(packed)], "area": float(rle.area(packed))}
