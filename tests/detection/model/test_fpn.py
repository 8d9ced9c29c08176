from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from agglo.detection.model.fpn import FPN


def test_the_pyramid_is_the_definition() -> None:
    torch.manual_seed(0)
    neck = FPN(5, 3, 7).double()
    maps = [torch.randn(2, 5, 12, 20), torch.randn(2, 5, 6, 10), torch.randn(2, 5, 3, 5)]
    maps = [value.double() for value in maps]
    inner, outer = ([block[0] for block in blocks] for blocks in (neck.pyramid.inner_blocks, neck.pyramid.layer_blocks))
    merged = [F.conv2d(value, conv.weight, conv.bias) for value, conv in zip(maps, inner, strict=True)]
    for fine in (1, 0):
        coarse = merged[fine + 1].repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        merged[fine] = merged[fine] + coarse
    expected = [F.conv2d(value, conv.weight, conv.bias, padding=1) for value, conv in zip(merged, outer, strict=True)]
    expected.append(expected[-1][:, :, ::2, ::2])
    found = neck(maps)
    assert [tuple(value.shape[-2:]) for value in found] == [(12, 20), (6, 10), (3, 5), (2, 3)]
    for ours, slow in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, slow)


def test_it_starts_as_mmdetections() -> None:
    """Xavier's uniform distribution, which torchvision's own start is not."""
    torch.manual_seed(0)
    for conv in [module for module in FPN(192, 4, 256).modules() if isinstance(module, nn.Conv2d)]:
        area = conv.kernel_size[0] ** 2
        bound = math.sqrt(6 / (area * (conv.in_channels + conv.out_channels)))
        assert 0.99 * bound < conv.weight.abs().max() <= bound
        assert not conv.bias.any()
