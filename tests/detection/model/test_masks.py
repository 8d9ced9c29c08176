from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from agglo.detection.model.masks import paste, targets_in_boxes
from tests.detection.model.references import roi_align


def test_mask_targets_are_the_share_of_each_cell_from_one_half_on() -> None:
    torch.manual_seed(0)
    masks = (F.avg_pool2d(torch.rand(3, 20, 30), 3, 1, 1) > 0.5).to(torch.uint8)
    boxes = torch.tensor(
        [[2.3, 1.7, 17.9, 12.2], [0.0, 0.0, 30.0, 20.0], [-4.0, 5.0, 33.0, 21.5], [3.0, 3.0, 4.0, 9.0]]
    )
    objects = torch.tensor([2, 0, 2, 1])
    found = targets_in_boxes(masks, objects, boxes, 6)
    inside = boxes.clamp(min=0).minimum(torch.tensor([30.0, 20, 30, 20]))
    for target, number, box in zip(found, objects, inside, strict=True):
        share = roi_align(masks[number][None].float(), box.tolist(), 6, 1)[0]
        clear = (share - 0.5).abs() > 1e-5
        assert clear.float().mean() > 0.8
        assert torch.equal(target[clear], (share >= 0.5).float()[clear])
    assert found.unique().tolist() == [0, 1]


def test_no_boxes_have_no_targets() -> None:
    found = targets_in_boxes(torch.zeros(0, 8, 8), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), 28)
    assert found.shape == (0, 28, 28)


@pytest.mark.parametrize("side", [28, 3])
def test_pasting_is_bilinear_sampling_of_the_whole_image(side: int) -> None:
    """Read at every pixel centre of the image, though only the pixels near the box are computed."""
    torch.manual_seed(0)
    squares = F.avg_pool2d(torch.rand(5, side, side), 3, 1, 1)
    squares = (squares - squares.mean()) * 4 + 0.5
    height, width = 25, 40
    boxes = torch.tensor(
        [
            [3.2, 4.8, 30.1, 20.7],
            [0.0, 0.0, 40.0, 25.0],
            [5.5, 5.5, 6.1, 6.2],
            [39.2, 24.1, 40.0, 25.0],
            [0, 3, 0.4, 24],
        ]
    )
    found = paste(squares, boxes, (height, width), 0.5)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    for mask, square, (x1, y1, x2, y2) in zip(found, squares, boxes, strict=True):
        places = torch.stack([(x - x1) / (x2 - x1) * 2 - 1, (y - y1) / (y2 - y1) * 2 - 1], dim=-1)
        whole = F.grid_sample(square[None, None], places[None], align_corners=False)[0, 0]
        assert torch.equal(mask, whole >= 0.5)
    assert found[0].any() and found[1].any()


def test_a_full_square_fills_the_pixels_whose_centres_are_in_the_box() -> None:
    mask = paste(torch.ones(1, 28, 28), torch.tensor([[2.6, 1.4, 6.4, 3.6]]), (6, 9), 0.5)[0]
    expected = torch.zeros(6, 9, dtype=torch.bool)
    expected[1:4, 3:6] = True  # centres 1.5 2.5 3.5 and 3.5 4.5 5.5
    assert torch.equal(mask, expected)


def test_a_box_without_area_has_an_empty_mask() -> None:
    boxes = torch.tensor([[3.5, 3.5, 3.5, 3.5], [4.0, 2.0, 4.0, 6.0]])
    assert not paste(torch.ones(2, 28, 28), boxes, (8, 8), 0.5).any()
