from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

from agglo.lab.tasks.detection.model.heads import Assignment, HeadSettings, RoIHeads, level_of, paste
from tests.lab.tasks.detection.model.references import difference, moved, roi_align, suppress

STRIDES = (4, 8, 16, 32)
# All proposals are in the sample, so that the losses can be written out.
SMALL = HeadSettings(
    width=5,
    box_width=11,
    mask_convolutions=2,
    finest_scale=14,
    box_assignment=Assignment(0.5, 0.5, 0.5, samples=10**6, positive_share=0.5),
)


def pyramid(batch: int, height: int = 64, width: int = 96) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(batch, 5, -(-height // stride), -(-width // stride)) for stride in (*STRIDES, 64)]


def heads(settings: HeadSettings = SMALL, n_classes: int = 3) -> RoIHeads:
    torch.manual_seed(0)
    module = RoIHeads(STRIDES, n_classes, settings)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return module


def some_boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand(count, 2, generator=generator) * torch.tensor([70.0, 40.0])
    return torch.cat([start, start + 2 + torch.rand(count, 2, generator=generator) * 22], dim=1)


def test_larger_boxes_are_read_from_coarser_levels() -> None:
    levels = {1: 0, 111.9: 0, 112: 1, 223: 1, 224: 2, 447: 2, 448: 3, 5000: 3}
    boxes = torch.tensor([[10.0, 10, 10 + side, 10 + side] for side in levels])
    assert level_of(boxes, 56, 4).tolist() == list(levels.values())


def test_pooled_features_are_the_definition() -> None:
    maps = pyramid(2)[:4]
    boxes = [torch.tensor([[3.2, 5.1, 20.9, 17.0], [0.0, 0.0, 96.0, 64.0], [90, 60, 96, 64]]), some_boxes(2, 3)]
    found = heads(replace(SMALL, finest_scale=7)).pool(maps, boxes, 3)
    flat = [(i, box) for i, part in enumerate(boxes) for box in part]
    levels = level_of(torch.cat(boxes), 7, 4).tolist()
    assert len(set(levels)) >= 3
    for result, (i, box), level in zip(found, flat, levels, strict=True):
        expected = roi_align(maps[level][i], box.tolist(), 3, STRIDES[level])
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_losses_are_those_of_mmdetection() -> None:
    module, maps = heads().requires_grad_(False), pyramid(3)
    objects = some_boxes(4, 5)
    masks = torch.zeros(4, 64, 96, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, objects.int().tolist(), strict=True):
        mask[y1 : (y1 + y2) // 2 + 1, x1:x2] = 1
    targets = [
        {"boxes": objects[part], "labels": labels, "masks": masks[part]}
        for part, labels in (
            (slice(3), torch.tensor([0, 2, 1])),
            (slice(3, 4), torch.tensor([2])),
            (slice(0), torch.zeros(0, dtype=torch.int64)),
        )
    ]
    near = [target["boxes"] + 0.4 * torch.randn(len(target["boxes"]), 4) for target in targets]
    proposals = [torch.cat([near[i], some_boxes(8, 10 + i)]) for i in range(3)]
    found = module.losses(maps, proposals, targets)

    cls = l1 = mask_loss = 0.0
    seen = positives = 0
    for i, target in enumerate(targets):
        candidates = torch.cat([target["boxes"], proposals[i]])
        logits, changes = module.box(module.pool([m[i : i + 1] for m in maps], [candidates], 7))
        squares = module.mask(module.pool([m[i : i + 1] for m in maps], [candidates], 14))
        table = box_iou(candidates, target["boxes"])
        for c, box in enumerate(candidates):
            # All thresholds are one half and no two objects overlap that much: the best one decides.
            best = int(table[c].argmax()) if len(target["boxes"]) and table[c].max() >= 0.5 else None
            label = 3 if best is None else int(target["labels"][best])
            cls -= float(logits[c].log_softmax(0)[label])
            seen += 1
            if best is None:
                continue
            positives += 1
            wanted = difference(target["boxes"][best].tolist(), box.tolist(), (0.1, 0.1, 0.2, 0.2))
            l1 += float((changes[c, label] - torch.tensor(wanted)).abs().sum())
            inside = box.clamp(min=0).minimum(torch.tensor([96.0, 64, 96, 64])).tolist()
            share = roi_align(target["masks"][best][None].float(), inside, 28, 1)[0]
            mask_loss += float(F.binary_cross_entropy_with_logits(squares[c, label], (share >= 0.5).float()))
    assert 8 <= positives < seen
    assert float(found["loss_cls"]) == pytest.approx(cls / seen, rel=1e-4)
    assert float(found["loss_bbox"]) == pytest.approx(l1 / seen, rel=1e-4)  # over all that were seen, not the positives
    assert float(found["loss_mask"]) == pytest.approx(mask_loss / positives, rel=2e-3)  # cells at one half may differ


def test_detections_are_the_definition_in_original_pixels() -> None:
    module, maps = heads(replace(SMALL, detections=12)), pyramid(2)
    sizes, original = [(64, 96), (50, 70)], [(128, 90), (50, 70)]
    proposals = [some_boxes(25, 1), some_boxes(25, 2)]
    with torch.no_grad():
        results = module.detect(maps, proposals, sizes, original)
        for i, result in enumerate(results):
            part = [m[i : i + 1] for m in maps]
            logits, changes = module.box(module.pool(part, [proposals[i]], 7))
            y, x = original[i][0] / sizes[i][0], original[i][1] / sizes[i][1]
            boxes, scores, labels = [], [], []
            for p, box in enumerate(proposals[i]):
                for label in range(3):
                    score = float(logits[p].softmax(0)[label])
                    if score > 0.05:
                        change = changes[p, label] * torch.tensor([0.1, 0.1, 0.2, 0.2])
                        x1, y1, x2, y2 = moved(box.tolist(), change.tolist(), sizes[i])
                        boxes.append([x1 * x, y1 * y, x2 * x, y2 * y])
                        scores.append(score)
                        labels.append(label)
            kept = suppress(boxes, scores, labels, 0.5)[:12]
            assert len(kept) == 12 and len(boxes) > 20
            assert result["labels"].tolist() == [labels[k] for k in kept]
            torch.testing.assert_close(result["scores"], torch.tensor([scores[k] for k in kept]), rtol=1e-4, atol=1e-5)
            expected = torch.tensor([boxes[k] for k in kept])
            torch.testing.assert_close(result["boxes"], expected, rtol=1e-4, atol=1e-3)
            given = result["boxes"] / torch.tensor([x, y, x, y])
            squares = module.mask(module.pool(part, [given], 14)).sigmoid()
            squares = squares[torch.arange(12), result["labels"]]
            assert torch.equal(result["masks"], paste(squares, result["boxes"], original[i], 0.5))
            assert result["masks"].shape == (12, *original[i])


def test_pasting_is_bilinear_sampling_of_the_whole_image() -> None:
    """Read at every pixel centre of the image, though only the pixels near the box are computed."""
    torch.manual_seed(0)
    squares = (F.avg_pool2d(torch.rand(4, 28, 28), 3, 1, 1) - 0.5) * 4 + 0.5
    height, width = 25, 40
    boxes = torch.tensor([[3.2, 4.8, 30.1, 20.7], [0, 0, 40, 25], [5.5, 5.5, 6.1, 6.2], [39.2, 24.1, 40, 25]])
    found = paste(squares, boxes, (height, width), 0.5)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    for mask, square, (x1, y1, x2, y2) in zip(found, squares, boxes, strict=True):
        positions = torch.stack([(x - x1) / (x2 - x1) * 2 - 1, (y - y1) / (y2 - y1) * 2 - 1], dim=-1)
        whole = F.grid_sample(square[None, None], positions[None], align_corners=False)[0, 0]
        assert torch.equal(mask, whole >= 0.5)
    assert found[0].any() and found[1].any()
