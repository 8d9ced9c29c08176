"""The spatial prior of ViT-Adapter: a small convolutional network that gives maps at four strides."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

_STEM_STRIDES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}  # of the first convolution and of the pooling, by the stem's stride


class SpatialPrior(nn.Module):
    """Images (B, 3, H, W) to four maps of `out_width` channels, at strides s, 2s, 4s and 8s.

    width: channels of the stem; the maps have 1, 2, 4 and 4 times as many before the last, 1 x 1, convolutions.
    stride: s, 4 in ViT-Adapter, whose patches are 16 pixels wide; 1 or 2 for smaller patches.
    """

    def __init__(self, width: int, out_width: int, stride: int = 4) -> None:
        super().__init__()
        if stride not in _STEM_STRIDES:
            raise ValueError(f"stride={stride!r} of the spatial prior; accepted: {', '.join(map(str, _STEM_STRIDES))}")
        first, pooling = _STEM_STRIDES[stride]
        self.stem = nn.Sequential(
            *_convolution(3, width, first),
            *_convolution(width, width, 1),
            *_convolution(width, width, 1),
            nn.MaxPool2d(3, pooling, padding=1),
        )
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stages = nn.ModuleList(
            nn.Sequential(*_convolution(before, after, 2)) for before, after in pairwise(widths)
        )
        self.projections = nn.ModuleList(nn.Conv2d(each, out_width, 1) for each in widths)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [cast(Tensor, self.stem(images))]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return [projection(each) for projection, each in zip(self.projections, maps, strict=True)]


def _convolution(width_in: int, width_out: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(width_in, width_out, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]
