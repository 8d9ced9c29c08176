from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes, Mask

from agglo.detection.model.mask_rcnn import Detector
from tests.detection.model.tiny import SMALL, TinyBackbone, rectangles, tiny_detector

LOSSES = ["loss_rpn_cls", "loss_rpn_bbox", "loss_cls", "loss_bbox", "loss_mask"]


def scene(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Two coloured rectangles on noise; the colour is the class."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(3, 64, 96, generator=generator) * 0.1
    boxes = [[6, 10, 40, 50], [52, 14, 88, 44]]
    for label, (x1, y1, x2, y2) in enumerate(boxes):
        image[label, y1:y2, x1:x2] += 2
    return image, rectangles(boxes, [0, 1], (64, 96))


def test_it_learns_two_rectangles() -> None:
    torch.manual_seed(0)
    detector = tiny_detector(n_classes=2)
    optimiser = torch.optim.AdamW(detector.parameters(), lr=3e-3)
    image, target = scene(0)
    for _ in range(80):
        losses = detector([image], [target])
        optimiser.zero_grad()
        sum(losses.values()).backward()
        optimiser.step()
    found = detector.eval()([image])[0]
    assert found["scores"][:2].min() > 0.6 and found["labels"][:2].sort().values.tolist() == [0, 1]
    order = found["labels"][:2].argsort()
    torch.testing.assert_close(found["boxes"][:2][order], target["boxes"], atol=5, rtol=0)
    masks = found["masks"][:2][order]
    shared = (masks & target["masks"].bool()).sum((1, 2)) / (masks | target["masks"].bool()).sum((1, 2))
    assert shared.min() > 0.7


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
        assert result["labels"].dtype == torch.int64


def test_a_pixel_and_an_image_without_objects_train_and_predict() -> None:
    detector = tiny_detector()
    images = [torch.randn(3, 1, 1), torch.randn(3, 40, 40)]
    targets = [rectangles([[0, 0, 1, 1]], [2], (1, 1)), rectangles([], [], (40, 40))]
    losses = detector(images, targets)
    assert list(losses) == LOSSES and all(value.ndim == 0 and value.isfinite() for value in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in detector.parameters())
    for result in detector.eval()(images, original_sizes=[(1, 1), (40, 40)]):
        assert result["boxes"].isfinite().all()


def test_a_thousand_objects() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 90, (1000, 2), generator=generator)
    boxes = torch.cat([start, start + torch.randint(1, 20, (1000, 2), generator=generator)], dim=1).tolist()
    target = rectangles(boxes, [i % 3 for i in range(1000)], (112, 112))
    losses = tiny_detector()([torch.randn(3, 112, 112)], [target])
    assert all(value.isfinite() for value in losses.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_losses_and_boxes_in_float32(dtype: torch.dtype) -> None:
    detector, (image, target) = tiny_detector(n_classes=2), scene(0)
    detector.requires_grad_(False)
    torch.manual_seed(0)
    plain = detector([image], [target])
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=dtype):
        half = detector([image], [target])
        found = detector.eval()([image])[0]
    assert detector.neck(detector.backbone(image[None]))[0].dtype == torch.float32  # autocast, not a cast model
    for name in LOSSES:
        assert half[name].dtype == torch.float32
        assert float(half[name]) == pytest.approx(float(plain[name]), rel=0.1, abs=0.05)
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32


def test_a_half_precision_model_predicts() -> None:
    detector = tiny_detector().eval().bfloat16()
    with torch.no_grad():
        found = detector([torch.randn(3, 64, 64).bfloat16()])[0]
    assert found["boxes"].dtype == torch.float32


def test_tv_tensors_are_targets_too() -> None:
    detector, (image, target) = tiny_detector(n_classes=2), scene(0)
    wrapped = {
        "boxes": BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(64, 96)),
        "labels": target["labels"],
        "masks": Mask(target["masks"]),
    }
    torch.manual_seed(0)
    expected = detector([image], [target])
    torch.manual_seed(0)
    found = detector([image], [wrapped])
    assert all(torch.equal(found[name], expected[name]) and type(found[name]) is Tensor for name in LOSSES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": torch.tensor([0, 2])}, "label 2; accepted: 0 to 1"),
        ({"labels": torch.tensor([-1, 0])}, "label -1"),
        ({"boxes": torch.tensor([[0.0, 0, 5, 5], [7, 7, 7, 9]])}, r"box \[7.0, 7.0, 7.0, 9.0\] has no area"),
        ({"boxes": torch.tensor([[0.0, 0, 5, 5], [7, 7, float("nan"), 9]])}, "nan.* has no area"),
        ({"boxes": torch.zeros(2, 5)}, r"boxes of shape \(2, 5\)"),
        ({"masks": torch.zeros(2, 64, 95)}, r"masks of shape \(2, 64, 95\); needed for 2 boxes: \(2, 64, 96\)"),
        ({"labels": torch.tensor([0])}, r"labels of shape \(1,\)"),
        (
            {"boxes": BoundingBoxes(torch.ones(2, 4), format="XYWH", canvas_size=(64, 96))},
            "XYWH; accepted: XYXY",
        ),
    ],
)
def test_a_wrong_target_is_named(change: dict[str, Tensor], said: str) -> None:
    detector, (image, target) = tiny_detector(n_classes=2), scene(0)
    with pytest.raises(ValueError, match=f"target 1.*{said}"):
        detector([image, image], [target, target | change])


def test_wrong_calls_are_named() -> None:
    detector, (image, target) = tiny_detector(n_classes=2), scene(0)
    with pytest.raises(ValueError, match="targets=None in training mode"):
        detector([image])
    with pytest.raises(ValueError, match="1 targets for 2 images"):
        detector([image, image], [target])
    with pytest.raises(ValueError, match="target 0 has no masks"):
        detector([image], [{"boxes": target["boxes"], "labels": target["labels"]}])
    with pytest.raises(ValueError, match="no images"):
        detector([], [])
    for wrong in (torch.zeros(1, 8, 8), torch.zeros(3, 0, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"image 0 is .*accepted: floating point, \(3, height, width\)"):
            detector([wrong], [target])
    with pytest.raises(ValueError, match="2 original_sizes for 1 images"):
        detector.eval()([image], original_sizes=[(1, 1), (2, 2)])
    with pytest.raises(ValueError, match="n_classes=0"):
        Detector(TinyBackbone(), n_classes=0, settings=SMALL)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_the_image_size(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = tiny_detector().eval()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(detector.backbone, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory with 2 images padded to 96 x 128"):
        detector([torch.zeros(3, 70, 10), torch.zeros(3, 3, 100)])


def test_the_cpus_own_out_of_memory_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = tiny_detector().eval()
    monkeypatch.setattr(detector.backbone, "forward", lambda *_: torch.empty(2**55))
    with pytest.raises(torch.OutOfMemoryError, match="1 images padded to 32 x 32"):
        detector([torch.zeros(3, 7, 7)])


def test_other_errors_pass_through() -> None:
    detector = tiny_detector().eval()
    detector.backbone.first = torch.nn.Conv2d(4, 8, 4, stride=4)
    with pytest.raises(RuntimeError, match="expected input"):
        detector([torch.zeros(3, 64, 64)])
