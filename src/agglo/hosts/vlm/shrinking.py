"""The baseline that asks whether merging is worth it: the picture itself made smaller, and nothing merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SmallerPictures:
    """Scales `pixel_values`, the first argument of `get_image_features`, to fewer tokens along a side.

    pixels: along the side of one token.
    options: arguments that tell the tower about it.
    """

    pixels: int
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(
        self, side: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = {**kwargs, **dict(self.options)}
        size = (side * self.pixels, side * self.pixels)
        mask = kwargs.get("pixel_attention_mask")
        if mask is not None:
            kwargs["pixel_attention_mask"] = _scaled(mask.float(), size, "nearest").to(mask.dtype)
        elif len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], _scaled(args[1].float(), size, "nearest").to(args[1].dtype), *args[2:])
        if args:
            return (_scaled(args[0], size, "bicubic"), *args[1:]), kwargs
        return args, {**kwargs, "pixel_values": _scaled(kwargs["pixel_values"], size, "bicubic")}


def _scaled(pictures: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Pictures (..., H, W) of another size."""
    flat = pictures.reshape(-1, 1, *pictures.shape[-2:])
    smooth = mode == "bicubic"
    return F.interpolate(flat, size, mode=mode, antialias=smooth).reshape(*pictures.shape[:-2], *size)
