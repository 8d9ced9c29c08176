from __future__ import annotations

import math

import pytest
import torch
from torchvision.models.detection.anchor_utils import AnchorGenerator

from agglo.detection.model.anchors import level_anchors, usable

RATIOS = (0.5, 1.0, 2.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("stride", "grid"), [(4, (3, 5)), (64, (1, 1)), (16, (1, 4))])
def test_anchors_are_unrounded_and_centred_on_multiples_of_the_stride(stride: int, grid: tuple[int, int]) -> None:
    expected = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            for ratio in RATIOS:
                height, width = 8 * stride * math.sqrt(ratio), 8 * stride / math.sqrt(ratio)
                x, y = column * stride, row * stride
                expected.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    torch.testing.assert_close(level_anchors(stride, grid, 8, RATIOS, CPU), torch.tensor(expected))


def test_torchvisions_anchors_are_these_rounded() -> None:
    theirs = AnchorGenerator(sizes=((32,),), aspect_ratios=(RATIOS,)).cell_anchors[0]
    ours = level_anchors(4, (1, 1), 8, RATIOS, CPU)
    assert torch.equal(ours.round(), theirs)
    assert not torch.equal(ours, theirs)


def test_places_beyond_the_images_own_padding_are_not_used() -> None:
    # 64 x 32 inside a batch of 96 x 128, at stride 64: one row and one column start inside.
    assert usable(64, (2, 2), 3, (64, 32), CPU).tolist() == [True] * 3 + [False] * 9
    inside = usable(32, (3, 4), 1, (64, 32), CPU).reshape(3, 4)
    assert inside.tolist() == [[True, False, False, False]] * 2 + [[False] * 4]
