"""What training does to pictures, besides bringing them to size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Augmentation:
    """The defaults are DeiT's.

    scale, ratio: of the random crop, area and aspect; ignored where pictures are squashed or shifted.
    shift: instead of such a crop, pad by so many pixels and crop to size again.
    flip: probability of mirroring.
    randaugment: timm's policy; None is none.
    colour_jitter: brightness, contrast and saturation; has no effect beside randaugment, as in timm.
    erasing: probability of random erasing.
    cutout: one rectangle of half the side in a random colour.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    shift: int | None = None
    flip: float = 0.5
    randaugment: str | None = "rand-m9-mstd0.5-inc1"
    colour_jitter: float = 0.0
    erasing: float = 0.25
    cutout: bool = False


# The study's, for pictures with several labels: Cutout in place of mirroring and random erasing.
SEVERAL_LABELS = Augmentation(flip=0.0, erasing=0.0, cutout=True)
