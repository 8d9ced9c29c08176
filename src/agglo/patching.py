"""apply, remove, reduction, trace: what users of agglo call on a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from agglo.hosts import diffusion
from agglo.hosts.registry import applied_modules, applied_towers, find_tower
from agglo.hosts.swap import ReducedModule, UnsupportedModelError, reduced_class
from agglo.hosts.vit.base import Layout
from agglo.methods import Method, Setting, create
from agglo.methods.base import Varies, square
from agglo.plan import Plan
from agglo.schedule import Rates, Schedule, as_schedule
from agglo.tracing import Trace

M = TypeVar("M")
_ATTRIBUTES = ("agglo_plan", "agglo_method", "agglo_trace")


def apply(
    model: M,
    method: str | Method = "atc",
    *,
    keep_rate: Rates | None = None,
    schedule: Schedule | Sequence[int] | None = None,
    threshold: float | None = None,
    blocks: Sequence[int] | None = None,
    tower: str | nn.Module | None = None,
    proportional: bool | None = None,
    **options: Any,
) -> M:
    """Make a vision transformer faster by reducing its tokens as it runs. In place; `agglo.remove` undoes it.

    What matters:
        keep_rate: fraction of patch tokens that stays at each stage, in (0, 1]; a list gives one per stage.
        method: "atc" (default), the name of another that `agglo.methods()` lists, or a Method.
        linkage (atc): "average", "single" or "complete".

    Instead of keep_rate, one of:
        schedule: `Stages`, `Constant`, `Linear`, `Geometric`, or a list of tokens removed at each block.
        threshold: merge tokens up to this cosine distance, so that every image keeps as many as it needs.

    To tinker with:
        blocks: 0-based blocks that reduce, for keep_rate and threshold; by default a quarter, a half and three
            quarters of the depth (3, 6, 9 of 12).
        features: what atc and tome compare tokens by: "keys", "keys_per_head", "tokens" or "values".
        proportional: let a merged token weigh in attention as much as its members did; None leaves it to the method.
        any other option of the method, by its name.
        tower: the submodule to reduce (or its name), for models with several.

    Outputs keep their shapes and token order. An earlier `apply` is replaced. Returns the model.

    Pipelines and models of diffusers have options of their own: see `agglo.hosts.diffusion.apply`.
    """
    if diffusion.is_diffusion(model):
        diffusion.require_none(schedule=schedule, threshold=threshold, blocks=blocks, tower=tower)
        diffusion.apply(model, method, keep_rate=keep_rate, proportional=proportional, **options)
        return model
    choices = {"keep_rate": keep_rate, "schedule": schedule, "threshold": threshold}
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"give one of keep_rate, schedule and threshold, not {' and '.join(given) or 'none'}")
    if schedule is not None and blocks is not None:
        raise ValueError("blocks go with keep_rate or threshold; a schedule has its own")
    chosen = create(method, **options)
    if threshold is not None and not chosen.takes_threshold:
        raise ValueError(f"method {chosen.name!r} takes no threshold; give keep_rate or schedule")
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold={threshold!r} must be a cosine distance, 0 to 2")
    if keep_rate is not None:
        schedule = chosen.schedule(keep_rate, blocks)
    decided = None if schedule is None else as_schedule(schedule)
    if decided is not None and decided.returning and chosen.tokens_return == "never":
        raise ValueError(f"{decided!r} is for methods whose tokens return; those that {chosen.name} drops are gone")
    module, host = find_tower(cast(nn.Module, model), tower)
    host.check(module)
    layout = host.layout(module)
    plan = Plan(
        schedule=decided,
        threshold=threshold,
        blocks=None if blocks is None else tuple(blocks),
        proportional=chosen.proportional if proportional is None else proportional,
        grid=layout.grid,
    )
    setting = _setting(plan, chosen, layout)  # an impossible request raises here, before anything changes
    loop = host.loop(module)
    _require_no_override(loop, host.mixin(module))
    _build(chosen, setting, module)
    _restore(loop)
    loop.__class__ = reduced_class(host.mixin(module), type(loop))
    for name, value in zip(_ATTRIBUTES, (plan, chosen, None), strict=True):
        setattr(loop, name, value)
    return model


def _setting(plan: Plan, method: Method, layout: Layout) -> Setting:
    targets = plan.targets(method, layout.patches, layout.depth, layout.grid)
    counts = [] if plan.schedule is None else [target for target in targets if target is not None]
    before = [layout.patches, *(counts if method.tokens_return == "never" else [layout.patches] * len(counts))]
    stages = tuple(zip(before, counts, strict=False))
    blocks = tuple(block for block, target in enumerate(targets) if target is not None)
    setting = Setting(stages, layout.width, layout.heads, layout.prefix, blocks)
    method.check(setting)
    return setting


def _build(method: Method, setting: Setting, module: nn.Module) -> None:
    """Parameters of a method that learns, as the model has its own: same device, dtype and mode.

    What an instance learned before stays where it still fits: the same method at another keep rate, say.
    """
    if type(method).build is not Method.build and not setting.width:
        raise UnsupportedModelError(f"{method.name} learns, and agglo cannot tell how wide {type(module).__name__} is")
    learned = method.state_dict() if isinstance(method, nn.Module) else {}
    method.build(setting)
    if isinstance(method, nn.Module):
        if _shapes(learned) == _shapes(method.state_dict()):
            method.load_state_dict(learned)
        like = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
        method.to(device=like.device, dtype=like.dtype).train(module.training)


def _shapes(state: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def _require_no_override(loop: nn.Module, mixin: type[ReducedModule]) -> None:
    """A function put on the instance goes before its class: the reduction would silently not happen."""
    ours = {name for cls in mixin.__mro__ if issubclass(cls, ReducedModule) for name in vars(cls)}
    theirs = sorted(ours.intersection(vars(loop)))
    if theirs:
        raise UnsupportedModelError(
            f"{theirs[0]} of this {type(loop).__name__} was replaced on the instance (accelerate's hooks and mixed "
            "precision do this), so that agglo's would never run: call agglo.apply before that happens"
        )


def remove(model: M) -> M:
    """Take every reduction out of a model again: it is exactly as it was. Returns the model."""
    if diffusion.is_diffusion(model):
        diffusion.remove(model)
        return model
    for module in applied_modules(cast(nn.Module, model)):
        _restore(module)
    return model


def _restore(module: nn.Module) -> None:
    if isinstance(module, ReducedModule):
        if type(module) is not reduced_class(module.agglo_mixin, module.agglo_original):
            raise RuntimeError(
                f"after agglo.apply something (parametrize, fully_shard) gave {module.agglo_original.__name__} another "
                "class; undo that before agglo.remove or another agglo.apply"
            )
        for name in _ATTRIBUTES:
            delattr(module, name)
        module.__class__ = module.agglo_original  # type: ignore[assignment]


@dataclass(frozen=True)
class Reduction:
    """What is applied to a model.

    counts: patch tokens really left after each block; None where a threshold makes them differ from image to image.
    varies: "no"; "at most" where images may keep fewer than the counts; "about" where they may keep more or fewer.
    returning: whether counts are of tokens that a block processes, while the others pass it by and are not lost.
    prefix: tokens in front that are never merged.
    gflops_before, gflops_after: multiply-adds of one image, in 1e9; of a diffusion model those of self-attention.
    levels: of a diffusion model, whose counts are of its self-attentions: tokens and groups at each resolution.
    """

    method: str
    schedule: str
    n_tokens: int
    prefix: int
    counts: list[int] | None
    gflops_before: float
    gflops_after: float | None
    varies: Varies = "no"
    returning: bool = False
    levels: tuple[diffusion.Level, ...] = ()

    def __str__(self) -> str:
        if self.levels:
            return (
                f"{self.method}, {self.schedule}: {'; '.join(map(str, self.levels))} tokens, self-attention "
                f"{self.gflops_before:.2f} -> {self.gflops_after:.2f} GFLOPs"
            )
        if self.counts is None or self.gflops_after is None:
            return f"{self.method}, {self.schedule}: {self.n_tokens} patch tokens, counts differ from image to image"
        bound = "" if self.varies == "no" else f"{self.varies} "
        return (
            f"{self.method}, {self.schedule}: {self.n_tokens} -> {bound}{self.counts[-1]} "
            f"patch tokens{' processed' if self.returning else ''} {self.counts}, "
            f"{self.gflops_before:.2f} -> {self.gflops_after:.2f} GFLOPs"
        )


def reduction(model: Any, n_tokens: int | None = None) -> Reduction | None:
    """What is applied to a model now, for its own input size or n_tokens patch tokens; None if nothing is.

    Of a diffusion model n_tokens are those of its finest resolution.
    """
    if diffusion.is_diffusion(model):
        return _diffusion_reduction(model, n_tokens)
    applied = applied_towers(model)
    if not applied:
        return None
    module, host = applied[0]
    layout, loop = host.layout(module), cast(ReducedModule, host.loop(module))
    plan, method = loop.agglo_plan, loop.agglo_method
    n_tokens = layout.patches if n_tokens is None else n_tokens
    grid = layout.grid if n_tokens == layout.patches or layout.grid is None else square(n_tokens)
    known = plan.schedule is not None
    counts = plan.counts(method, n_tokens, layout.depth, grid) if known else None
    return Reduction(
        method=repr(method),
        schedule=repr(plan.schedule) if known else f"threshold {plan.threshold}",
        n_tokens=n_tokens,
        prefix=layout.prefix,
        counts=counts,
        gflops_before=layout.gflops([n_tokens] * layout.depth, n_tokens),
        gflops_after=None if counts is None else layout.gflops(counts, n_tokens, method.acts == "before block"),
        varies=method.varies,
        returning=method.tokens_return != "never",
    )


def _diffusion_reduction(model: Any, n_tokens: int | None) -> Reduction | None:
    applied = diffusion.applied(model)
    if not applied:
        return None
    counts = diffusion.counts(applied[0], n_tokens)
    return Reduction(
        method=counts.method,
        schedule=f"keep rate {counts.keep_rate}",
        n_tokens=counts.n_tokens,
        prefix=0,
        counts=counts.groups,
        gflops_before=counts.gflops_before,
        gflops_after=counts.gflops_after,
        returning=True,
        levels=counts.levels,
    )


@contextmanager
def trace(model: Any) -> Iterator[Trace]:
    """Record what is merged where while the model runs.

    >>> # with agglo.trace(model) as t: model(x)
    >>> # t.groupings[3].labels: after block 3, the group of every token of every image
    """
    applied = diffusion.applied(model) if diffusion.is_diffusion(model) else applied_modules(model)
    if not applied:
        raise ValueError(f"nothing is applied to this {type(model).__name__}: call agglo.apply(model, ...) first")
    record = Trace()
    before = [module.agglo_trace for module in applied]
    for module in applied:
        module.agglo_trace = record  # type: ignore[assignment]
    try:
        yield record
    finally:
        for module, earlier in zip(applied, before, strict=True):
            module.agglo_trace = earlier
