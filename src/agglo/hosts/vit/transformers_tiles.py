"""Mllama: pictures in tiles. Each tile brings a class token in front and, so that there is a multiple of 8, padding at
its end. Neither is ever merged; patches are, also with those of other tiles. Only the first of its two loops over
layers is reduced: before the second one every tile is given its own embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MULTIPLE = 8


@dataclass(frozen=True)
class Tiles:
    """patches: of a tile. kept: tokens of a tile that are never merged. order: of all tokens (T,), these first."""

    patches: int
    kept: int
    order: Tensor

    def bias(self, mask: Tensor) -> Tensor:
        """A mask (B, 1, T, T) between the tokens in this order."""
        return mask[:, :, self.order][..., self.order]


def has_tiles(owner: Any) -> bool:
    """Whether the loop over layers is Mllama's."""
    return type(owner).__name__ == "MllamaVisionEncoder"


def length_of(config: Any) -> tuple[int, int]:
    """Patches of a tile, and tokens beside them."""
    patches = (config.image_size // config.patch_size) ** 2
    return patches, 1 + (-(patches + 1)) % _MULTIPLE


def tiles_of(owner: Any, x: Tensor) -> Tiles:
    """The tiles in tokens x (B, T, C)."""
    patches, kept = length_of(owner.config)
    places = torch.arange(x.shape[1], device=x.device).view(-1, patches + kept)
    others = torch.cat([places[:, :1], places[:, 1 + patches :]], dim=1)
    return Tiles(patches, kept, torch.cat([others.flatten(), places[:, 1 : 1 + patches].flatten()]))
