"""The feature pyramid: torchvision's modules, which compute what MMDetection's do, with MMDetection's start."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool


class FPN(nn.Module):
    """Maps of several strides -> maps of `width` channels, and one more of twice the last stride.

    1x1 convolutions, nearest upsampling added from coarse to fine, then 3x3 convolutions; the additional level takes
    every second value of the last.
    """

    def __init__(self, channels: int, levels: int, width: int) -> None:
        super().__init__()
        self.pyramid = FeaturePyramidNetwork([channels] * levels, width, extra_blocks=LastLevelMaxPool())
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """[(B, C, H, W), ...] -> [(B, width, H, W), ...], one more than given."""
        return list(self.pyramid({str(i): value for i, value in enumerate(maps)}).values())
