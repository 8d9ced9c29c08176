"""What a reduction leaves of a diffusion model's tokens and of the work of its self-attentions, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agglo.hosts.diffusion.family import Family
from agglo.hosts.diffusion.plan import Plan
from agglo.hosts.diffusion.state import Site
from agglo.methods import Grid
from agglo.methods.base import square


@dataclass(frozen=True)
class Level:
    """The self-attentions of one resolution.

    downsample: how much coarser than the latent. attentions: how many.
    tokens, groups: of one picture, before and after; the same where nothing merges.
    """

    downsample: int
    attentions: int
    tokens: int
    groups: int

    def __str__(self) -> str:
        return f"{self.attentions} self-attentions at 1/{self.downsample}: {self.tokens} -> {self.groups}"


@dataclass(frozen=True)
class Counts:
    """levels: finest first. groups: at every self-attention, in order. gflops: of self-attention alone, 1e9
    multiply-adds of one picture with its projections, text left out."""

    method: str
    keep_rate: float
    n_tokens: int
    levels: tuple[Level, ...]
    groups: list[int]
    gflops_before: float
    gflops_after: float


def counts(model: Any, n_tokens: int | None = None) -> Counts:
    """For pictures (or videos) of n_tokens tokens at the model's finest resolution, or of the model's own size."""
    plan, family = model.agglo_setup.plan, model.agglo_setup.family
    sites = [modules.site for modules in family.find(model)]
    grids = _grids(model, family, sites, n_tokens)
    groups = [_groups(plan, site, *grids[site.downsample]) for site in sites]
    tokens = [grids[site.downsample][0] for site in sites]
    levels = []
    for downsample in sorted(grids):
        here = [index for index, site in enumerate(sites) if site.downsample == downsample]
        if here:
            levels.append(Level(downsample, len(here), tokens[here[0]], min(groups[index] for index in here)))
    looks_at_keys = getattr(plan.method, "features", None) in ("keys", "keys_per_head", "values")
    merged = groups if "attn" in plan.merge else tokens
    before = sum(_madds(site, n, n, False) for site, n in zip(sites, tokens, strict=True))
    after = sum(_madds(site, n, k, looks_at_keys and k < n) for site, n, k in zip(sites, tokens, merged, strict=True))
    finest = grids[1][0]
    return Counts(repr(plan.method), plan.keep_rate, finest, tuple(levels), groups, before / 1e9, after / 1e9)


def _grids(
    model: Any, family: Family, sites: Sequence[Site], n_tokens: int | None
) -> dict[int, tuple[int, Grid | None]]:
    """By downsampling: tokens, and their grid where it is known."""
    axes = family.own_axes(model)
    if n_tokens is not None:
        axes = square(n_tokens)
    elif axes is None:
        raise ValueError(f"{type(model).__name__} has no size of its own: say for how many, n_tokens=4096")
    found: dict[int, tuple[int, Grid | None]] = {}
    for downsample in {1, *(site.downsample for site in sites)}:
        if axes is None:
            assert n_tokens is not None
            found[downsample] = (n_tokens // downsample**2, None)
        else:
            rows, columns = (-(-length // downsample) for length in axes)
            found[downsample] = (rows * columns, (rows, columns))
    return found


def _groups(plan: Plan, site: Site, n_tokens: int, grid: Grid | None) -> int:
    return plan.target(n_tokens, grid) if site.index in plan.sites else n_tokens


def _madds(site: Site, n_tokens: int, n_groups: int, looks_at_keys: bool) -> int:
    """Query, key, value and output projections, scores and their weighted sums; keys of all tokens to group them by."""
    projections = 4 * n_groups * site.width * site.inner
    return projections + 2 * n_groups**2 * site.inner + (n_tokens * site.width * site.inner if looks_at_keys else 0)
