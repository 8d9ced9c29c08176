"""apply and remove for diffusion models and pipelines."""

from __future__ import annotations

import inspect
import sys
from typing import Any, cast

from torch import nn

from agglo.config import DEFAULTS, ReductionConfig
from agglo.hosts.common.swap import CHANGING, ReducedModule, UnsupportedModelError, install, reduced_class, uninstall
from agglo.hosts.diffusers import passes
from agglo.hosts.diffusers.families import FAMILIES, Family, Modules, family_of, named, own_axes
from agglo.hosts.diffusers.state import DiffusionPlan
from agglo.methods import LearnedMethod, Method

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
    found = [module for part in parts for module in part.modules() if family_of(module) is not None]
    if not found:
        inside = ", ".join(type(part).__name__ for part in parts) or "no unet and no transformer"
        supported = ", ".join(family.models for family in FAMILIES)
        raise UnsupportedModelError(
            f"{type(model).__name__} ({inside}) holds no diffusion model that agglo can reduce; supported: {supported}"
        )
    return found


def applied(model: Any) -> list[nn.Module]:
    """Return the denoisers inside that are reduced now."""
    return [denoiser for denoiser in denoisers(model) if isinstance(denoiser, passes.ReducedDenoiser)]


def apply(model: Any, config: ReductionConfig, method: Method) -> None:
    """Merge the image tokens around each self-attention of a diffusion model, or of those of a pipeline."""
    for name in ("schedule", "threshold", "blocks", "place", "last_block", "output"):
        if getattr(config, name) != DEFAULTS[name]:
            raise ValueError(f"{name}={getattr(config, name)!r} is for classifiers; a diffusion model takes keep_rate")
    if not isinstance(config.keep_rate, float):
        raise ValueError(f"keep_rate={config.keep_rate!r} must be one number for a diffusion model")
    _require_grouping(method)
    weighs = method.proportional if config.proportional is None else config.proportional
    prepared = []
    for denoiser in denoisers(model):
        family = family_of(denoiser)
        assert family is not None
        found = _reduced_modules(denoiser, family, config)
        indices = frozenset(modules.site.index for modules in found)
        owner: Any = denoiser.agglo_original if isinstance(denoiser, ReducedModule) else type(denoiser)
        arguments = tuple(inspect.signature(owner.forward).parameters)[1:]
        plan = DiffusionPlan(config, method, config.keep_rate, indices, weighs, family, owner, arguments)
        _require_reachable(plan, denoiser, found)
        prepared.append((denoiser, found, plan))
    with CHANGING:
        remove(model)
        for denoiser, found, plan in prepared:
            _install(denoiser, found, plan)
        if not isinstance(model, nn.Module):
            model.__class__ = reduced_class(passes.ReducedPipeline, type(model))


def _require_grouping(method: Method) -> None:
    """Raise ValueError unless the method answers with groups and needs only tokens, keys and values for it."""
    reasons = {
        "is for classifiers": method.name == "tome",
        "learns": isinstance(method, LearnedMethod),
        "mixes tokens softly": method.kind == "merges soft",
        "asks what the class token attends to": method.needs_class_attention or method.remembers,
        "asks for attention weights": method.needs_attention_received,
        "lets tokens skip whole blocks": method.tokens_return != "never",
        "has an option for each reduction": bool(method.lists()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"method {method.name!r} {reason}: around a self-attention of a diffusion model only methods that "
                "group tokens work, such as 'atc', 'tomesd', 'pool' and 'random'"
            )


def _reduced_modules(model: nn.Module, family: Family, config: ReductionConfig) -> list[Modules]:
    """Return the modules of the self-attentions that `max_downsample` includes."""
    every = list(family.find(model))
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


def _require_reachable(plan: DiffusionPlan, model: nn.Module, found: list[Modules]) -> None:
    """Raise ValueError for an impossible request, where the model says how large its inputs are."""
    axes = own_axes(model)
    if axes is not None and plan.keep_rate < 1:
        for downsample in {modules.site.downsample for modules in found}:
            rows, columns = (-(-length // downsample) for length in axes)
            plan.target(rows * columns, (rows, columns))


def _install(model: nn.Module, found: list[Modules], plan: DiffusionPlan) -> None:
    for modules in found:
        if modules.block in modules.attentions:
            install(modules.block, modules.mixin, modules.site)
            continue
        for attention in modules.attentions:
            install(attention, modules.mixin, plan)
        for part, module in (("cross", modules.cross), ("mlp", modules.mlp)):
            if part in plan.config.merge and module is not None:
                install(module, passes.ReducedPart, plan)
        install(modules.block, passes.ReducedBlock, modules.site)
    install(model, passes.ReducedDenoiser, plan)


def remove(model: Any) -> None:
    """Take every reduction out of a diffusion model or pipeline again: it is exactly as it was."""
    with CHANGING:
        if isinstance(model, passes.ReducedPipeline):
            pipeline = cast(Any, model)
            pipeline.__class__ = pipeline.agglo_original
        for denoiser in denoisers(model):
            for module in denoiser.modules():
                uninstall(module)
