"""A small detector for tests of the heads: two convolutions instead of a transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.lab.tasks.detection.model.mask_rcnn import Detector
from agglo.lab.tasks.detection.model.settings import HeadSettings

SMALL = HeadSettings(width=16, box_width=32, mask_convolutions=2)


class TinyBackbone(nn.Module):
    """Four maps of 8 channels at strides 4, 8, 16, 32; remembers the batch and the sizes it was given."""

    out_channels = 8
    strides = (4, 8, 16, 32)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 4, stride=4)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.given: tuple[Tensor, Sequence[tuple[int, int]] | None] | None = None

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> list[Tensor]:
        self.given = images, sizes
        features = self.second(F.relu(self.first(images)))
        return [F.avg_pool2d(features, 2**i) for i in range(4)]


def tiny_detector(n_classes: int = 3, settings: HeadSettings = SMALL) -> Detector:
    torch.manual_seed(0)
    return Detector(TinyBackbone(), n_classes=n_classes, settings=settings)


def rectangles(boxes: Sequence[Sequence[int]], labels: Sequence[int], size: tuple[int, int]) -> dict[str, Tensor]:
    """A target whose objects fill their boxes."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        mask[y1:y2, x1:x2] = 1
    box = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": box, "labels": torch.tensor(labels, dtype=torch.int64), "masks": masks}
