"""Mask R-CNN on two convolutions instead of a transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.lab.tasks.detection.model.heads import HeadSettings
from agglo.lab.tasks.detection.model.mask_rcnn import Detector
from tests.lab.tasks.detection.model.references import rectangles

LOSSES = ["loss_rpn_cls", "loss_rpn_bbox", "loss_cls", "loss_bbox", "loss_mask"]


class TinyBackbone(nn.Module):
    """Four maps of 8 channels; remembers the batch and the sizes it was given."""

    out_channels, strides = 8, (4, 8, 16, 32)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        self.given = images, sizes
        features = self.second(F.relu(self.first(images)))
        return [F.avg_pool2d(features, 2**i) for i in range(4)]


def tiny_detector() -> Detector:
    torch.manual_seed(0)
    return Detector(TinyBackbone(), n_classes=3, settings=HeadSettings(width=16, box_width=32, mask_convolutions=2))


def two_rectangles() -> tuple[Tensor, dict[str, Tensor]]:
    image, boxes = torch.randn(3, 64, 96) * 0.1, [[6, 10, 40, 50], [52, 14, 88, 44]]
    for label, (x1, y1, x2, y2) in enumerate(boxes):
        image[label, y1:y2, x1:x2] += 2
    return image, rectangles(boxes, [0, 1], (64, 96))


def test_images_of_several_sizes_are_padded_to_one_multiple_of_32() -> None:
    detector = tiny_detector().eval()
    images = [torch.ones(3, 33, 50), torch.ones(3, 64, 20)]
    with torch.no_grad():
        results = detector(images, original_sizes=[(66, 100), (64, 20)])
    batch, sizes = detector.backbone.given
    assert tuple(batch.shape) == (2, 3, 64, 64) and list(sizes) == [(33, 50), (64, 20)]
    assert batch[0, :, :33, :50].all() and batch[0].sum() == 3 * 33 * 50 and batch[1].sum() == 3 * 64 * 20
    for result, (height, width) in zip(results, [(66, 100), (64, 20)], strict=True):
        assert result["masks"].shape[1:] == (height, width) and result["masks"].dtype == torch.bool
        assert (result["boxes"] >= 0).all() and (result["boxes"] <= torch.tensor([width, height] * 2)).all()
        assert len(result["boxes"]) == len(result["scores"]) == len(result["labels"]) == len(result["masks"]) <= 100


def test_a_pixel_and_an_image_without_objects_train_and_predict() -> None:
    detector = tiny_detector()
    images = [torch.randn(3, 1, 1), torch.randn(3, 40, 40)]
    losses = detector(images, [rectangles([[0, 0, 1, 1]], [2], (1, 1)), rectangles([], [], (40, 40))])
    assert list(losses) == LOSSES and all(value.ndim == 0 and value.isfinite() for value in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in detector.parameters())
    for result in detector.eval()(images, original_sizes=[(1, 1), (40, 40)]):
        assert result["boxes"].isfinite().all()


@torch.no_grad()
def test_autocast_keeps_losses_and_boxes_in_float32() -> None:
    detector, (image, target) = tiny_detector(), two_rectangles()
    torch.manual_seed(0)
    plain = detector([image], [target])
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = detector([image], [target])
        found = detector.eval()([image])[0]
    for name in LOSSES:
        assert half[name].dtype == torch.float32
        assert float(half[name]) == pytest.approx(float(plain[name]), rel=0.1, abs=0.05)
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    assert detector.bfloat16()([image.bfloat16()])[0]["boxes"].dtype == torch.float32


def test_wrong_images_and_targets_are_named() -> None:
    detector, (image, target) = tiny_detector(), two_rectangles()
    for change in (
        {"labels": torch.tensor([0, 3])},
        {"boxes": torch.tensor([[0.0, 0, 5, 5], [7, 7, float("nan"), 9]])},
        {"boxes": torch.zeros(2, 5)},
        {"masks": torch.zeros(2, 64, 95)},
    ):
        with pytest.raises(ValueError, match="target 1"):
            detector([image, image], [target, target | change])
    with pytest.raises(ValueError, match="1 targets for 2 images"):
        detector([image, image], [target])
    for wrong in (torch.zeros(1, 8, 8), torch.zeros(3, 0, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="image 0"):
            detector([wrong], [target])


def test_the_pyramid_starts_as_mmdetections() -> None:
    """Xavier's uniform distribution, which torchvision's own start is not."""
    torch.manual_seed(0)
    settings = HeadSettings(width=64, box_width=8, mask_convolutions=0)
    neck = Detector(TinyBackbone(), n_classes=3, settings=settings).neck
    for conv in [module for module in neck.modules() if isinstance(module, nn.Conv2d)]:
        bound = math.sqrt(6 / (conv.kernel_size[0] ** 2 * (conv.in_channels + conv.out_channels)))
        assert 0.99 * bound < conv.weight.abs().max() <= bound and not conv.bias.any()
