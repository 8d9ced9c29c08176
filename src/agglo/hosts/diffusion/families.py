"""Which family a denoiser is of."""

from __future__ import annotations

from torch import nn

from agglo.hosts.diffusion.family import Family
from agglo.hosts.diffusion.transformers import LTX, SD3, Flux, PatchTransformer, Wan
from agglo.hosts.diffusion.unets import UNet

FAMILIES: tuple[Family, ...] = (UNet(), SD3(), PatchTransformer(), Flux(), Wan(), LTX())


def family_of(model: nn.Module) -> Family | None:
    """The family of a denoiser; None if it is of none."""
    return next((family for family in FAMILIES if family.recognises(model)), None)


def supported() -> str:
    return ", ".join(family.models for family in FAMILIES)
