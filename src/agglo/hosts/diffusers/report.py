"""The tokens that a reduction leaves in a diffusion model, and the work of its self-attentions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agglo.config import ReductionConfig
from agglo.hosts.diffusers.families import own_axes
from agglo.hosts.diffusers.state import DiffusionPlan, Site
from agglo.methods import Grid
from agglo.methods.base import square


@dataclass(frozen=True)
class Level:
    """The self-attentions of one resolution, 1/downsample of the latent's: tokens and groups of one image."""

    downsample: int
    attentions: int
    tokens: int
    groups: int

    def __str__(self) -> str:
        return f"{self.attentions} self-attentions at 1/{self.downsample}: {self.tokens} -> {self.groups}"


@dataclass(frozen=True)
class Counts:
    """Levels, finest first; groups at every self-attention, in order; GFLOPs of self-attention, text left out."""

    config: ReductionConfig
    method: str
    keep_rate: float
    n_tokens: int
    levels: tuple[Level, ...]
    groups: list[int]
    gflops_before: float
    gflops_after: float


def counts(model: Any, n_tokens: int | None = None) -> Counts:
    """Count for images (or videos) of n_tokens tokens at the model's finest resolution, or of the model's own size."""
    plan: DiffusionPlan = model.agglo_applied
    sites = [modules.site for modules in plan.family.find(model)]
    grids = {downsample: _grid(model, downsample, n_tokens) for downsample in {1, *(site.downsample for site in sites)}}
    tokens = [grids[site.downsample][0] for site in sites]
    groups = [
        plan.target(*grids[site.downsample]) if site.index in plan.sites else n
        for site, n in zip(sites, tokens, strict=True)
    ]
    levels = []
    for downsample in sorted({site.downsample for site in sites}):
        here = [count for count, site in zip(groups, sites, strict=True) if site.downsample == downsample]
        levels.append(Level(downsample, len(here), grids[downsample][0], min(here)))
    compares_projected = getattr(plan.method, "features", None) in ("keys", "keys_per_head", "values")
    merged = groups if "attn" in plan.config.merge else tokens
    before = sum(_madds(site, n) for site, n in zip(sites, tokens, strict=True))
    after = sum(_madds(site, k) for site, k in zip(sites, merged, strict=True))
    if compares_projected:
        after += sum(n * site.width * site.inner for site, n, k in zip(sites, tokens, merged, strict=True) if k < n)
    return Counts(
        plan.config, repr(plan.method), plan.keep_rate, grids[1][0], tuple(levels), groups, before / 1e9, after / 1e9
    )


def _grid(model: Any, downsample: int, n_tokens: int | None) -> tuple[int, Grid | None]:
    """Return the number of tokens at a resolution, and their grid where it is known."""
    axes = own_axes(model) if n_tokens is None else square(n_tokens)
    if axes is not None:
        rows, columns = (-(-length // downsample) for length in axes)
        return rows * columns, (rows, columns)
    if n_tokens is None:
        raise ValueError(f"{type(model).__name__} has no size of its own: say for how many, n_tokens=4096")
    return n_tokens // downsample**2, None


def _madds(site: Site, n_groups: int) -> int:
    """Count projections, attention scores and weighted sums."""
    return 4 * n_groups * site.width * site.inner + 2 * n_groups**2 * site.inner
