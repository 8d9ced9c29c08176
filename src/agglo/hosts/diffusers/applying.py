"""apply, remove and report for diffusion models and pipelines."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from torch import nn

from agglo.clustering.api import window_sides
from agglo.config import CLASSIFIER_FIELDS, ReductionConfig
from agglo.grouping import Mean
from agglo.hosts.common.swap import (
    CHANGING,
    UnsupportedModelError,
    install,
    original_class,
    reduced_class,
    uninstall,
)
from agglo.hosts.diffusers import mixins
from agglo.hosts.diffusers.architectures import ARCHITECTURES, Architecture, Modules, architecture_of, named, own_axes
from agglo.hosts.diffusers.state import DiffusionPlan, Site
from agglo.methods import Grid, LearnedMethod, Method
from agglo.methods.base import square

# Multiply-adds of one image's self-attention. Merging must save as many to be as fast as the dense model at one image
# on a CPU: models of 64 to 1024 tokens and 64 to 768 channels cross at 17 to 50 million.
WORTH_MERGING = 20e6
_COMPONENTS = ("unet", "transformer", "transformer_2")  # where pipelines have their denoisers


def is_diffusion(model: Any) -> bool:
    """Return whether this is a pipeline of diffusers, or a module that is or holds one of its models."""
    if "diffusers" not in sys.modules:
        return False
    things = model.modules() if isinstance(model, nn.Module) else [model]
    return any(
        cls.__name__ in ("ModelMixin", "DiffusionPipeline", "ModularPipeline") and cls.__module__[:9] == "diffusers"
        for thing in things
        for cls in type(thing).__mro__
    )


def denoisers(model: Any) -> list[nn.Module]:
    """Return the models inside that agglo can reduce; UnsupportedModelError if there are none."""
    if isinstance(model, nn.Module):
        parts = [model]
    else:
        parts = [part for name in _COMPONENTS if isinstance(part := getattr(model, name, None), nn.Module)]
    found = [module for part in parts for module in part.modules() if architecture_of(module) is not None]
    if not found:
        inside = ", ".join(type(part).__name__ for part in parts) or "no unet and no transformer"
        supported = ", ".join(architecture.models for architecture in ARCHITECTURES)
        raise UnsupportedModelError(
            f"{type(model).__name__} ({inside}) holds no diffusion model that agglo can reduce; supported: {supported}"
        )
    return found


def applied(model: Any) -> list[nn.Module]:
    """Return the denoisers inside that are reduced now."""
    return [denoiser for denoiser in denoisers(model) if isinstance(denoiser, mixins.ReducedDenoiser)]


def apply(model: Any, config: ReductionConfig, method: Method) -> None:
    """Merge the image tokens around each self-attention of a diffusion model, or of those of a pipeline."""
    config.require_defaults(CLASSIFIER_FIELDS, "it is for classifiers; a diffusion model takes keep_rate")
    if not isinstance(config.keep_rate, float):
        raise ValueError(f"keep_rate={config.keep_rate!r} must be one number for a diffusion model")
    _require_grouping(method)
    weighs = method.proportional if config.proportional is None else config.proportional
    mean: Mean = getattr(method, "mean", "plain")  # an option of some methods
    prepared = []
    for denoiser in denoisers(model):
        architecture = architecture_of(denoiser)
        assert architecture is not None
        found = _reduced_modules(denoiser, architecture, config)
        indices = frozenset(modules.site.index for modules in found)
        plan = DiffusionPlan(config, method, config.keep_rate, indices, weighs, mean, architecture)
        for downsample in {modules.site.downsample for modules in found} if own_axes(denoiser) is not None else ():
            plan.target(*_tokens(denoiser, downsample, None))  # an impossible request raises here
        prepared.append((denoiser, found, plan))
    with CHANGING:
        remove(model)
        for denoiser, found, plan in prepared:
            _install(denoiser, found, plan)
        if not isinstance(model, nn.Module):
            model.__class__ = reduced_class(mixins.ReducedPipeline, type(model))
    for denoiser, *_ in prepared:
        saved = 0.0 if own_axes(denoiser) is None else saved_at_most(denoiser)
        if saved != 0 and saved < WORTH_MERGING:
            _say_that_little_is_saved(original_class(denoiser).__name__)


def _require_grouping(method: Method) -> None:
    """Raise ValueError unless the method answers with groups and needs only tokens, keys and values for it."""
    reasons = {
        "is for classifiers": method.name == "tome",
        "learns": isinstance(method, LearnedMethod),
        "mixes tokens softly": method.kind == "merges soft",
        "asks what the class token attends to": method.needs_class_attention or method.remembers,
        "asks for attention weights": method.needs_attention_received,
        "lets tokens skip whole blocks": method.tokens_return != "never",
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"method {method.name!r} {reason}: diffusion models need methods that group tokens, such as 'atc', "
                "'tomesd', 'pool' and 'random'"
            )


def _reduced_modules(model: nn.Module, architecture: Architecture, config: ReductionConfig) -> list[Modules]:
    """Return the modules of the self-attentions that `max_downsample` includes."""
    every = list(architecture.find(model))
    if not every:
        raise UnsupportedModelError(f"{type(model).__name__} has no self-attention over image tokens")
    if any(named(modules.block, "ToMeBlock") for modules in every):
        raise UnsupportedModelError("tomesd is applied to this model: call tomesd.remove_patch on it first")
    levels = sorted({modules.site.downsample for modules in every})
    finest = levels[0] if config.max_downsample is None else config.max_downsample
    found = [modules for modules in every if modules.site.downsample <= finest]
    if not found:
        raise ValueError(
            f"max_downsample={config.max_downsample!r} reduces nothing: {type(model).__name__} has self-attention at "
            f"downsampling {', '.join(map(str, levels))}"
        )
    for part in ("cross", "mlp"):
        if part in config.merge and all(getattr(modules, part) is None for modules in found):
            raise ValueError(f"merge={part!r}: the blocks of {type(model).__name__} have no such part to merge")
    return found


def _install(model: nn.Module, found: list[Modules], plan: DiffusionPlan) -> None:
    for modules in found:
        if modules.block in modules.attentions:
            install(modules.block, modules.mixin, modules.site)
            continue
        for attention in modules.attentions:
            install(attention, modules.mixin, plan)
        if (layer := _linear_keys(modules)) is not None:
            install(layer, mixins.ReducedKeys, plan)
        for part, module in (("cross", modules.cross), ("mlp", modules.mlp)):
            if part in plan.config.merge and module is not None:
                install(module, mixins.ReducedPart, plan)
        install(modules.block, mixins.ReducedBlock, modules.site)
    install(model, mixins.ReducedDenoiser, plan)


def _linear_keys(modules: Modules) -> nn.Module | None:
    """Return the layer of keys of a block's first attention where it need not run again for the merged tokens."""
    layer = getattr(modules.attentions[0], "to_k", None) if modules.mixin is mixins.ReducedAttention else None
    return layer if original_class(layer) is nn.Linear else None


def remove(model: Any) -> None:
    """Take every reduction out of a diffusion model or pipeline again: it is exactly as it was."""
    with CHANGING:
        if isinstance(model, mixins.ReducedPipeline):
            pipeline = cast(Any, model)
            pipeline.__class__ = pipeline.agglo_original
        for denoiser in denoisers(model):
            for module in denoiser.modules():
                uninstall(module)


@dataclass(frozen=True)
class Level:
    """The self-attentions of one resolution, 1/downsample of the latent's: tokens and groups of one image."""

    downsample: int
    attentions: int
    tokens: int
    groups: int
    window: int | tuple[int, int] | None = None  # tokens per side of the windows in which they are clustered, if any

    def __str__(self) -> str:
        within = "" if self.window is None else " in windows of {} x {}".format(*window_sides(self.window))
        return f"{self.attentions} self-attentions at 1/{self.downsample}: {self.tokens} -> {self.groups}{within}"


def saved_at_most(model: Any) -> float:
    """Return the most multiply-adds that merging saves at one self-attention of one image.

    For a reduced denoiser that has a size of its own.
    """
    plan: DiffusionPlan = model.agglo_applied
    found = [modules for modules in plan.architecture.find(model) if modules.site.index in plan.sites]
    return max(_madds_saved(plan, modules, *_tokens(model, modules.site.downsample, None)) for modules in found)


@cache
def _say_that_little_is_saved(name: str) -> None:
    logging.getLogger("agglo").warning(
        "merging saves less than it costs in the self-attentions of this %s, which have few tokens of few channels: "
        "it is likely slower than without (docs/synthesis.md)",
        name,
    )


def counted(model: Any, n_tokens: int | None = None) -> dict[str, Any]:
    """Return the fields of `agglo.report` for a reduced denoiser, whose finest resolution has n_tokens image tokens."""
    plan: DiffusionPlan = model.agglo_applied
    every = list(plan.architecture.find(model))
    sites = [modules.site for modules in every]
    at = {downsample: _tokens(model, downsample, n_tokens) for downsample in {1, *(site.downsample for site in sites)}}
    tokens = [at[site.downsample][0] for site in sites]
    groups = [
        plan.target(*at[site.downsample]) if site.index in plan.sites else n
        for site, n in zip(sites, tokens, strict=True)
    ]
    levels = []
    for downsample in sorted({site.downsample for site in sites}):
        here = [count for count, site in zip(groups, sites, strict=True) if site.downsample == downsample]
        merges = min(here) < at[downsample][0]
        window = plan.method.window_in(plan.window(*at[downsample])) if merges else None
        levels.append(Level(downsample, len(here), at[downsample][0], min(here), window))
    before = sum(map(_madds, sites, tokens))
    reduced = [modules for modules in every if modules.site.index in plan.sites]
    after = before - sum(_madds_saved(plan, modules, *at[modules.site.downsample]) for modules in reduced)
    return {
        "config": plan.config,
        "method": repr(plan.method),
        "schedule": f"keep rate {plan.keep_rate}",
        "n_tokens": at[1][0],
        "counts": groups,
        "gflops_before": before / 1e9,
        "gflops_after": after / 1e9,
        "levels": tuple(levels),
    }


def _tokens(model: Any, downsample: int, n_tokens: int | None) -> tuple[int, Grid | None]:
    """Return the number of tokens at a resolution, and their grid where it is known."""
    axes = own_axes(model) if n_tokens is None else square(n_tokens)
    if axes is not None:
        rows, columns = (-(-length // downsample) for length in axes)
        return rows * columns, (rows, columns)
    if n_tokens is None:
        raise ValueError(f"{type(model).__name__} has no size of its own: say for how many, n_tokens=4096")
    return n_tokens // downsample**2, None


def _madds_saved(plan: DiffusionPlan, modules: Modules, n_tokens: int, grid: Grid | None) -> int:
    """Return the multiply-adds that merging saves at a self-attention, less those that it takes to compare tokens."""
    site, n_groups = modules.site, plan.target(n_tokens, grid)
    if n_groups == n_tokens:
        return 0
    compared = 0 if plan.projection is None else n_tokens * site.width * site.inner
    if plan.reuses_keys and _linear_keys(modules) is not None:
        compared -= n_groups * site.width * site.inner
    merged = n_groups if "attn" in plan.config.merge else n_tokens
    return _madds(site, n_tokens) - _madds(site, merged) - compared


def _madds(site: Site, n_groups: int) -> int:  # of projections, attention scores and weighted sums
    return 4 * n_groups * site.width * site.inner + 2 * n_groups**2 * site.inner
