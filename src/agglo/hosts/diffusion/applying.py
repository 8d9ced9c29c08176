"""apply and remove for diffusion models and pipelines."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from agglo.hosts.diffusion import attentions, mixins
from agglo.hosts.diffusion.families import family_of, supported
from agglo.hosts.diffusion.family import Family, Modules, named
from agglo.hosts.diffusion.plan import PARTS, SHARES, Plan, checked, settled_method
from agglo.hosts.swap import ReducedModule, UnsupportedModelError, reduced_class
from agglo.methods import Method
from agglo.schedule import Rates

_COMPONENTS = ("unet", "transformer", "transformer_2")  # where pipelines have their denoisers
_ROLES: dict[str, type[ReducedModule]] = {
    "tokens": attentions.ReducedAttention,
    "map": attentions.ReducedMapAttention,
    "joint": attentions.ReducedJointAttention,
    "flux": attentions.ReducedFluxAttention,
    "rotary": attentions.ReducedRotaryAttention,
}
_changing = threading.RLock()


def is_diffusion(model: Any) -> bool:
    """Whether this is a pipeline of diffusers, or a module that is or holds one of its models."""
    if "diffusers" not in sys.modules:
        return False
    if isinstance(model, nn.Module):
        return any(named(module, "ModelMixin") and _is_of_diffusers(module) for module in model.modules())
    return named(model, "DiffusionPipeline", "ModularPipeline") and _is_of_diffusers(model)


def _is_of_diffusers(thing: Any) -> bool:
    return any(cls.__module__.split(".")[0] == "diffusers" for cls in type(thing).__mro__)


def denoisers(model: Any) -> list[nn.Module]:
    """The models inside that agglo can reduce; UnsupportedModelError if there are none."""
    if isinstance(model, nn.Module):
        parts = [model]
    else:
        parts = [part for name in _COMPONENTS if isinstance(part := getattr(model, name, None), nn.Module)]
    found = [module for part in parts for module in part.modules() if family_of(module) is not None]
    if not found:
        inside = ", ".join(type(part).__name__ for part in parts) or "no unet and no transformer"
        raise UnsupportedModelError(
            f"{type(model).__name__} ({inside}) holds no diffusion model that agglo can reduce; supported: "
            f"{supported()}"
        )
    return found


def require_none(**classifier_options: Any) -> None:
    """ValueError if one of apply's options is given that a diffusion model has no use for."""
    for name, value in classifier_options.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is for classifiers; a diffusion model takes keep_rate")


def apply(
    model: Any,
    method: str | Method = "atc",
    *,
    keep_rate: Rates | None = None,
    proportional: bool | None = None,
    variant: str | None = None,
    max_downsample: int | None = None,
    merge: str | Iterable[str] = ("attn",),
    share: str = "block",
    every: int = 1,
    drift: float | None = None,
    **options: Any,
) -> None:
    """Merge the image tokens around each self-attention of a diffusion model, or of those of a pipeline.

    What matters:
        keep_rate: groups for every token, in (0, 1].
        method: "atc" (default), "tome" as in tomesd, "pool", "random", or another that groups tokens.
        variant: "paper" for the ATC paper's synthesis (block inputs compared, no proportional attention), "tomesd" for
            tomesd 0.1.3. None is agglo's own: keys compared, groups weighed by their sizes.
        max_downsample: how much coarser than the latent the tokens may be that still merge; None takes the finest
            resolution that has attention.

    To tinker with:
        merge: parts of a block that run with one token per group: "attn", "cross", "mlp".
        proportional: whether log(size) is added to the logits; None leaves it to the method.
        share: "resolution" lets the blocks of a resolution share the grouping of the first of them.
        every: denoising steps for which a block keeps its grouping.
        drift: keep it until its features have moved by this much, relative to what they were.
        any option of the method: linkage, features, mean (atc); features, stride, use_rand, seed (tome).
        window, connectivity, spread (atc): cluster within windows of the grid, or neighbouring groups only, as
            `agglo.cluster` does.
    """
    if not isinstance(keep_rate, (int, float)) or not 0 < keep_rate <= 1:
        raise ValueError(f"keep_rate={keep_rate!r} must be one number in (0, 1] for a diffusion model")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be a whole number of denoising steps, 1 or more")
    if drift is not None and not drift >= 0:
        raise ValueError(f"drift={drift!r} must be a relative change, 0 or more")
    checked("share", share, SHARES)
    parts = frozenset(checked("merge", part, PARTS) for part in ((merge,) if isinstance(merge, str) else merge))
    if not parts:
        raise ValueError(f"merge={merge!r} leaves nothing to merge; accepted: {', '.join(map(repr, PARTS))}")
    chosen, weighs = settled_method(method, variant, proportional, options)
    prepared = []
    for denoiser in denoisers(model):
        family = family_of(denoiser)
        assert family is not None
        sites = _sites(denoiser, family, max_downsample, parts)
        reduced = frozenset(modules.site.index for modules in sites)
        plan = Plan(chosen, float(keep_rate), reduced, parts, weighs, share, every, drift)
        _try_out(plan, family, denoiser, sites)
        prepared.append((denoiser, family, sites, plan))
    with _changing:
        remove(model)
        for denoiser, family, sites, plan in prepared:
            _install(denoiser, family, sites, plan)
        if not isinstance(model, nn.Module):
            _swap(model, mixins.ReducedPipeline)


def _sites(model: nn.Module, family: Family, max_downsample: int | None, parts: frozenset[str]) -> list[Modules]:
    family.check(model)
    found = list(family.find(model))
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} has no self-attention over image tokens")
    _require_plain_calls(model, found)
    levels = sorted({modules.site.downsample for modules in found})
    finest = levels[0] if max_downsample is None else max_downsample
    sites = [modules for modules in found if modules.site.downsample <= finest]
    if not sites:
        raise ValueError(
            f"max_downsample={max_downsample!r} reduces nothing: {type(model).__name__} has self-attention at "
            f"downsampling {', '.join(map(str, levels))}"
        )
    absent = {
        "cross": all(modules.cross is None for modules in sites),
        "mlp": all(modules.mlp is None for modules in sites),
    }
    for part, is_absent in absent.items():
        if part in parts and is_absent:
            raise ValueError(f"merge={part!r}: the blocks of {type(model).__name__} have no such part to merge")
    return sites


def _require_plain_calls(model: nn.Module, found: Sequence[Modules]) -> None:
    """UnsupportedModelError for a __call__ that ours would replace, and for blocks that tomesd merges already."""
    for modules in found:
        for module in (model, modules.block, *modules.attentions, modules.cross, modules.mlp):
            if module is None:
                continue
            original = module.agglo_original if isinstance(module, ReducedModule) else type(module)
            if original.__call__ is not nn.Module.__call__:
                raise UnsupportedModelError(f"{original.__name__} has a __call__ of its own, which agglo would replace")
            if original.__name__ == "ToMeBlock":
                raise UnsupportedModelError("tomesd is applied to this model: call tomesd.remove_patch on it first")


def _try_out(plan: Plan, family: Family, model: nn.Module, sites: Sequence[Modules]) -> None:
    """An impossible request raises here, before anything changes, where the model says how large its inputs are."""
    axes = family.own_axes(model)
    if axes is not None and plan.keep_rate < 1:
        for downsample in {modules.site.downsample for modules in sites}:
            rows, columns = (-(-length // downsample) for length in axes)
            plan.target(rows * columns, (rows, columns))


def _install(model: nn.Module, family: Family, sites: Sequence[Modules], plan: Plan) -> None:
    for modules in sites:
        modules.block.agglo_site = modules.site  # type: ignore[assignment]
        for attention in modules.attentions:
            _swap(attention, _ROLES[modules.role])
        if modules.role == "map":
            continue
        if "cross" in plan.merge and modules.cross is not None:
            _swap(modules.cross, mixins.ReducedCross)
        if "mlp" in plan.merge and modules.mlp is not None:
            _swap(modules.mlp, mixins.ReducedMlp)
        _swap(modules.block, mixins.ReducedBlock)
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    positions = {name: position for position, name in enumerate(names)}
    model.agglo_setup = mixins.Setup(plan, family, positions)  # type: ignore[assignment]
    mixins.with_forward(reduced_class(mixins.ReducedDenoiser, type(model)))
    _swap(model, mixins.ReducedDenoiser)


def _swap(thing: Any, mixin: type[ReducedModule]) -> None:
    thing.__class__ = reduced_class(mixin, type(thing))


def remove(model: Any) -> None:
    """Take every reduction out of a diffusion model or pipeline again: it is exactly as it was."""
    with _changing:
        if isinstance(model, mixins.ReducedPipeline):
            pipeline = cast(Any, model)
            pipeline.__class__ = pipeline.agglo_original
        for denoiser in denoisers(model):
            for module in denoiser.modules():
                if isinstance(module, ReducedModule):
                    _restore(module)


def _restore(module: Any) -> None:
    if type(module) is not reduced_class(module.agglo_mixin, module.agglo_original):
        raise RuntimeError(
            f"after agglo.apply something (parametrize, fully_shard) gave {module.agglo_original.__name__} another "
            "class; undo that before agglo.remove or another agglo.apply"
        )
    module.__class__ = module.agglo_original  # type: ignore[assignment]
    for name in ("agglo_site", "agglo_setup"):
        vars(module).pop(name, None)


def applied(model: Any) -> list[nn.Module]:
    """The denoisers inside that are reduced now."""
    return [denoiser for denoiser in denoisers(model) if isinstance(denoiser, mixins.ReducedDenoiser)]
