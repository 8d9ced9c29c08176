"""What users of agglo call on a model: apply, remove, report and trace, dispatched by the kind of model.

All may be called while other threads run the model. A forward pass that has begun goes on to its end with the plan, the
method and the traces that it began with. Calls of `apply` and `remove` wait for each other. (Training, moving or
loading weights is seen by passes that run. And where DataParallel copies a model for several devices, changing it while
it is copied is as unsafe as without agglo.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, TypeVar, cast

from torch import nn

from agglo import tuned as tuned_results
from agglo.budget import recipe_options, recipe_schedule, solve
from agglo.checks import flag, number
from agglo.config import DIFFUSION_FIELDS, ReductionConfig
from agglo.hosts import diffusers
from agglo.hosts.common import learned
from agglo.hosts.common.base import Host, Layout, require_whole_blocks
from agglo.hosts.common.swap import (
    CHANGING,
    Applied,
    Head,
    Reading,
    ReducedModule,
    ReducedReader,
    Setting,
    UnsupportedModelError,
    healing_of,
    install,
    put_back,
    require_no_override,
    uninstall,
)
from agglo.hosts.registry import applied_modules, applied_towers, find_tower
from agglo.hosts.vlm.families import find_vlm
from agglo.hosts.vlm.processors import AdaptedProcessor, adapt_processor, image_tokens, restored
from agglo.hosts.vlm.reduction import VLMReduction, late_reduction, reduced_vlms, tower_reduction, vlm_reduction_of
from agglo.methods import Method, ModelShape
from agglo.methods.base import Varies, square
from agglo.plan import Plan
from agglo.schedule import Schedule, Stages
from agglo.text import parse_call
from agglo.tracing import Trace, listening

__all__ = ["Report", "adapt_processor", "apply", "image_tokens", "recipe", "remove", "report", "trace"]

M = TypeVar("M")


def apply(
    model: M,
    method: str | Method | ReductionConfig = "atc",
    *,
    tuned: str | PathLike[str] | None = None,
    tower: str | nn.Module | None = None,
    probe: bool = True,
    **arguments: Any,
) -> M:
    """Make a vision transformer faster by reducing its tokens as it runs. In place; `agglo.remove` undoes it.

    What matters:
        method: "atc" (default), the name of another method that `agglo.list_methods()` lists, a `Method`, or a whole
            `ReductionConfig`.
        flops: fraction of the dense model's multiply-adds that is left. Schedule and options are the best that are
            known for any model (`agglo.recipe`).
        keep_rate: fraction of patch tokens that stays at each of the paper's stages, in (0, 1]; a list gives one per
            stage. Or one of `schedule` and `threshold`.
        linkage (atc): "average", "single" or "complete".

    To tinker with:
        Every field of `ReductionConfig` and every option of the method, by its name: `apply(model, keep_rate=0.5,
        linkage="single")` is `apply(model, ReductionConfig(keep_rate=0.5, options={"linkage": "single"}))`.

    Args:
        model: A vision transformer, a model that holds one, or a model or pipeline of diffusers.
        method: See above.
        tuned: In place of everything else: a file that `agglo.tune` wrote, or the name of a ready-made result.
        tower: The submodule to reduce (or its name), for models with several.
        probe: Before anything changes, run one block of each kind both as the library does and in parts, on a small
            random input, and raise UnsupportedModelError if the two differ. Done once per kind; False leaves it out.
        arguments: Fields of `ReductionConfig` and options of the method.

    Outputs keep their shapes and token order, unless `output` says otherwise. An earlier `apply` is replaced; forward
    passes that run in other threads meanwhile go on with it to their end. Returns the model.

    A method that learns brings parameters (`agglo_method.*` in the state dict). Apply it before an optimiser is made,
    which would not know of them, and before DistributedDataParallel or FSDP wraps the model. Applied again by its name,
    with the same options, it keeps what it learned if all shapes are the same (dynamicvit at another keep rate), and
    starts anew with a warning if not (sit at another keep rate). Two models with one instance share its parameters.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("deit_tiny_patch16_224"), keep_rate=0.5)
    >>> agglo.report(model).counts
    [196, 196, 196, 98, 98, 98, 49, 49, 49, 24, 24, 24]
    """
    flag("probe", probe)
    config = _config(method, tuned, arguments)
    if config.flops is not None:
        config = _solved(model, method if isinstance(method, Method) else config.method, config, tower)
    chosen = method if isinstance(method, Method) else config.create_method()
    for part in _modules(model):
        healing = healing_of(part)
        if healing is not None and healing.config != config:
            healed = f"the weights of this {type(model).__name__} were healed for {healing.config}, not for {config}"
            warnings.warn(f"{healed}: use that config, agglo.remove, or the weights of before", stacklevel=2)
    if diffusers.is_diffusion(model):
        if tower is not None:
            raise ValueError(f"tower={tower!r} is for classifiers; of a diffusion model all denoisers are reduced")
        diffusers.apply(model, config, chosen)
        return model
    if chosen.for_diffusion:
        raise ValueError(f"method={chosen.name!r} is for diffusion models; for others use 'tome' or 'atc'")
    config.require_defaults(DIFFUSION_FIELDS, "it is for diffusion models")
    whole = cast(nn.Module, model)
    if config.output not in ("merged_late", "smaller_image"):
        _apply_to_tower(whole, config, chosen, tower=tower, probe=probe, by_name=not isinstance(method, Method))
        return model
    if tower is not None:
        raise ValueError(f"tower={tower!r} has no effect: output={config.output!r} lets the tower run whole")
    module, family = find_vlm(whole, config.output)
    reduction = late_reduction(module, family, config, chosen)
    with CHANGING:
        require_no_override(module, family.mixin)
        for former in applied_modules(whole):
            uninstall(former)
        install(module, family.mixin, reduction)
    return model


def recipe(
    model: Any,
    method: str | Method = "atc",
    *,
    flops: float = 0.5,
    tower: str | nn.Module | None = None,
    **arguments: Any,
) -> ReductionConfig:
    """Return the config that `agglo.apply(model, flops=...)` applies, with as many tokens as the FLOPs allow.

    The method reduces at every block from a quarter to three quarters of the depth, by the same fraction at each, and
    ATC compares tokens and holds back those that the class token attends to (all tokens, where no head reads the class
    token alone). A model's own images can do better: `agglo.tune`.

    Args:
        model: A vision transformer, or a model that holds one.
        method: As for `agglo.apply`; other methods than ATC take the schedule and keep their own options.
        flops: Fraction of the dense model's multiply-adds that is left, met from below.
        tower: As for `agglo.apply`.
        arguments: Fields of `ReductionConfig` and options of the method, which the recipe leaves as they are given.

    Raises:
        ValueError: The method cannot leave so few tokens.

    >>> import timm
    >>> model = timm.create_model("deit_tiny_patch16_224")
    >>> config = agglo.recipe(model, flops=0.5)
    >>> config.schedule.counts(196, 12)
    [196, 196, 196, 145, 107, 79, 59, 43, 32, 24, 24, 24]
    """
    config = _config(method, None, {"flops": flops, **arguments})
    return _solved(model, method if isinstance(method, Method) else config.method, config, tower)


def _solved(
    model: Any, method: str | Method, config: ReductionConfig, tower: str | nn.Module | None
) -> ReductionConfig:
    """Return the recipe for a model in place of a config's `flops`."""
    if diffusers.is_diffusion(model):
        raise ValueError(f"flops={config.flops!r} is for classifiers and encoders; a diffusion model takes keep_rate")
    if config.output != "restored":
        raise ValueError(f"flops={config.flops!r} does not go with output={config.output!r}: give keep_rate")
    flops = config.flops
    assert flops is not None
    module, host = find_tower(model, tower)
    layout = host.layout(module)
    try:
        host.head(model, module)
        reads_class_token = True
    except UnsupportedModelError:
        reads_class_token = False
    given = {name: value for name, value in config.given().items() if name != "flops"}
    own = recipe_options(config.method, reads_class_token) if isinstance(method, str) else {}

    def config_of(amount: float) -> ReductionConfig:
        schedule = recipe_schedule(layout.depth, flops, amount)
        return ReductionConfig.of(method, **{**own, **given, "schedule": schedule})

    def cost_of(candidate: ReductionConfig) -> float:
        chosen = candidate.create_method() if isinstance(method, str) else method
        plan = _plan(model, module, host, layout, candidate, chosen)
        _shape_of(plan, chosen, layout)
        dense, reduced = _gflops(plan, chosen, layout, layout.patches)
        return (reduced or dense) / dense

    return solve(config_of, cost_of, flops)


def _modules(model: Any) -> list[nn.Module]:
    """Return a model itself, or the reduced denoisers of a pipeline; a processor is no module."""
    if isinstance(model, nn.Module):
        return [model]
    return diffusers.applied(model) if diffusers.is_diffusion(model) else []


def _config(method: str | Method | ReductionConfig, tuned: Any, arguments: dict[str, Any]) -> ReductionConfig:
    if tuned is not None:
        others = arguments.keys() - {"output"}
        if method != "atc" or others:
            raise ValueError(f"tuned={tuned!r} goes with output alone, not with {', '.join(others) or 'method'}")
        return replace(tuned_results.config(tuned), **arguments)
    if isinstance(method, ReductionConfig):
        if arguments:
            raise ValueError(f"{min(arguments)!r} is not in the config: dataclasses.replace(config, ...) changes one")
        return method
    if not isinstance(method, str):
        return ReductionConfig.of(method, **arguments)
    name, values, written = parse_call(method)
    if values or written.keys() & arguments.keys():
        raise ValueError(f"method={method!r}: write name:key=value, and give each key once")
    return ReductionConfig.of(name, **written, **arguments)


def _apply_to_tower(
    model: nn.Module,
    config: ReductionConfig,
    method: Method,
    *,
    tower: str | nn.Module | None,
    probe: bool,
    by_name: bool,
) -> None:
    """Let the tower of a model run reduced, in place of any earlier reduction.

    by_name: whether the method was given by its name, so that a learned one may keep its parameters.
    """
    found_vlm = find_vlm(model, config.output) if config.output == "merged" else None
    module, host = find_tower(model, tower)
    require_whole_blocks(module)
    host.check(module)
    if probe:
        host.prove(module)
    layout = host.layout(module)
    head = _head(model, module, host, config)
    plan = _plan(model, module, host, layout, config, method)
    shape = _shape_of(plan, method, layout)  # an impossible request raises here, before anything changes
    further: list[tuple[nn.Module, type[ReducedModule], Setting]] = []
    if found_vlm is not None:
        plan, reduction = tower_reduction(*found_vlm, layout, plan, config, method, host)
        further.append((found_vlm[0], found_vlm[1].mixin, reduction))
    if method.reads_grid and (grid_forwarding := host.grid_forwarding(module)) is not None:
        further.append((module, *grid_forwarding))
    loop, mixin = host.loop(module), host.mixin(module)
    if head is not None and head.reader is not None:
        further.append((head.reader, ReducedReader, Reading(replace(head, reader=None), mixin)))
    with CHANGING:
        for each, override in [(loop, mixin), *((each, override) for each, override, _ in further)]:
            require_no_override(each, override)
        method = learned.prepare(method, by_name, shape, model=model, tower=module, loop=loop)
        install(loop, mixin, Applied(plan, method, config))
        readers = [each for each in model.modules() if isinstance(each, ReducedReader) and loop in each.modules()]
        for former in [*readers, *reduced_vlms(model)]:
            uninstall(former)
        for each, override, setting in further:
            install(each, override, setting)


def _head(model: nn.Module, module: nn.Module, host: Host, config: ReductionConfig) -> Head | None:
    """Return what reads the class token alone, if the last block is to compute nothing else."""
    return host.head(model, module) if config.last_block == "class_token" else None


def _plan(
    model: nn.Module, module: nn.Module, host: Host, layout: Layout, config: ReductionConfig, method: Method
) -> Plan:
    head = _head(model, module, host, config)
    return Plan(
        schedule=_schedule(config, method, host),
        threshold=config.threshold,
        blocks=config.blocks,
        proportional=method.proportional if config.proportional is None else config.proportional,
        grid=layout.grid,
        place=config.place or method.place,
        reads=None if head is None else head.reads,
        ends=(layout.prefix - layout.suffix, layout.suffix),
    )


def _gflops(plan: Plan, method: Method, layout: Layout, n_tokens: int) -> tuple[float, float | None]:
    """Return the multiply-adds of an image, in 1e9: dense, and reduced, or None where a threshold decides."""
    grid = layout.grid if n_tokens == layout.patches or layout.grid is None else square(n_tokens)
    dense = layout.gflops([n_tokens] * layout.depth, n_tokens)
    if plan.schedule is None:
        return dense, None
    n_front = plan.front(method, plan.targets(method, n_tokens, layout.depth, grid)[-1])
    counts = plan.counts(method, n_tokens, layout.depth, grid)
    return dense, layout.gflops(counts, n_tokens, plan.place == "before_block", n_front)


def _schedule(config: ReductionConfig, method: Method, host: Host) -> Schedule | None:
    if config.keep_rate is None:
        return config.schedule
    schedule = method.schedule(config.keep_rate, config.blocks)
    if host.rates_are_nested and isinstance(schedule, Stages) and not schedule.returning:
        return replace(schedule, nested=True)
    return schedule


def _shape_of(plan: Plan, method: Method, layout: Layout) -> ModelShape:
    targets = plan.targets(method, layout.patches, layout.depth, layout.grid, strict=True)
    counts = [] if plan.schedule is None else [target for target in targets if target is not None]
    before = [layout.patches, *(counts if method.tokens_return == "never" else [layout.patches] * len(counts))]
    stages = tuple(zip(before, counts, strict=False))
    blocks = tuple(block for block, target in enumerate(targets) if target is not None)
    shape = ModelShape(stages, layout.width, layout.heads, layout.prefix, blocks, plan.place)
    method.check(shape)
    return shape


def remove(model: M) -> M:
    """Take every reduction out of a model, or of a processor that `adapt_processor` changed: it is exactly as it was.

    Forward passes that run in other threads meanwhile go on reduced to their end. The parameters that a method has
    learned are taken out too: save the state dict first, or keep the instance, which can be applied again. Parameters
    that `agglo.heal` trained get their former values, whatever they are by now. Returns the model.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), keep_rate=0.5)
    >>> print(agglo.report(agglo.remove(model)))
    None
    """
    with CHANGING:
        for part in _modules(model):
            put_back(part)
        if diffusers.is_diffusion(model):
            diffusers.remove(model)
            return model
        if isinstance(model, AdaptedProcessor):
            restored(model)
            return model
        for module in applied_modules(cast(nn.Module, model)):
            uninstall(module)
    return model


@dataclass(frozen=True)
class Report:
    """What is applied to a model.

    Attributes:
        config: What was asked for.
        method: The Python that makes it, and the same of schedule.
        n_tokens: Patch tokens of an image.
        prefix: Tokens in front that are never merged.
        counts: Patch tokens left after each block; None where a threshold makes them differ from image to image.
        gflops_before: Multiply-adds of one image, in 1e9; of a diffusion model those of self-attention.
        gflops_after: The same once reduced.
        varies: "no"; "at_most" where images may keep fewer than the counts; "about" where they may keep more or fewer.
        returning: Whether counts are of tokens that a block processes, while the others pass it by and are not lost.
        levels: Of a diffusion model, whose counts are of its self-attentions: tokens and groups at each resolution.
        image_tokens: Of an image in a language model's prompt, without reduction and with it; None where that is the
            same, or depends on the image's size.

    >>> import timm
    >>> found = agglo.report(agglo.apply(timm.create_model("deit_tiny_patch16_224"), keep_rate=0.5))
    >>> found.n_tokens, found.prefix, f"{found.gflops_before:.2f} -> {found.gflops_after:.2f} GFLOPs"
    (196, 1, '1.25 -> 0.62 GFLOPs')
    """

    config: ReductionConfig
    method: str
    schedule: str
    n_tokens: int = 0
    prefix: int = 0
    counts: list[int] | None = None
    gflops_before: float = 0.0
    gflops_after: float | None = None
    varies: Varies = "no"
    returning: bool = False
    levels: tuple[diffusers.Level, ...] = ()
    image_tokens: tuple[int, int] | None = None

    def __str__(self) -> str:
        leaving = "" if self.image_tokens is None else ", {} -> {} image tokens".format(*self.image_tokens)
        gflops = f"{self.gflops_before:.2f} -> {self.gflops_after or 0:.2f} GFLOPs"
        if self.gflops_after is None:
            differ = f"{self.n_tokens} patch tokens, counts differ from image to image"
            what = "the tower runs whole" if leaving else differ
        elif self.levels or self.counts is None:
            what = f"{'; '.join(map(str, self.levels))} tokens, self-attention {gflops}"
        else:
            bound = "" if self.varies == "no" else f"{self.varies} ".replace("_", " ")
            processed = " processed" if self.returning else ""
            what = f"{self.n_tokens} -> {bound}{self.counts[-1]} patch tokens{processed} {self.counts}, {gflops}"
        return f"{self.method}, {self.schedule}: {what}{leaving}"


def report(model: Any, n_tokens: int | None = None) -> Report | None:
    """Return what is applied to a model now; None if nothing is.

    Args:
        model: What `apply` was given, or a part of it.
        n_tokens: Patch tokens of an image, if not those of the model's own input size; of a diffusion model those of
            its finest resolution.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("deit_tiny_patch16_224"), schedule="linear:8")
    >>> agglo.report(model).counts[-1], agglo.report(model, n_tokens=400).counts[-1]
    (105, 309)
    """
    if diffusers.is_diffusion(model):
        denoisers = diffusers.applied(model)
        return Report(**diffusers.counted(denoisers[0], n_tokens), returning=True) if denoisers else None
    towers = applied_towers(model)
    reduction = next((vlm_reduction_of(module) for module in reduced_vlms(model)), None)
    if not towers and reduction is not None:
        return _late_reduction(model, reduction)
    if not towers:
        return None
    module, host = towers[0]
    applied: Applied | None = getattr(host.loop(module), "agglo_applied", None)
    if applied is None:  # removed meanwhile, by another thread
        return None
    layout, plan, method = host.layout(module), applied.plan, applied.method
    n_tokens = layout.patches if n_tokens is None else n_tokens
    grid = layout.grid if n_tokens == layout.patches or layout.grid is None else square(n_tokens)
    known = plan.schedule is not None
    before, after = _gflops(plan, method, layout, n_tokens)
    return Report(
        config=applied.config,
        method=repr(method),
        schedule=repr(plan.schedule) if known else f"threshold {plan.threshold}",
        n_tokens=n_tokens,
        prefix=layout.prefix,
        counts=plan.counts(method, n_tokens, layout.depth, grid) if known else None,
        gflops_before=before,
        gflops_after=after,
        varies=method.varies,
        returning=method.tokens_return != "never",
        image_tokens=_image_tokens(reduction),
    )


def _image_tokens(reduction: VLMReduction | None) -> tuple[int, int] | None:
    return None if reduction is None or reduction.dense is None else (reduction.dense, reduction.count())


def _late_reduction(model: nn.Module, reduction: VLMReduction) -> Report:
    """Report on a model whose tower runs whole."""
    found = Report(
        reduction.config,
        method=repr(reduction.method) if reduction.shrink is None else "smaller image",
        schedule=repr(reduction.plan.schedule),
        image_tokens=_image_tokens(reduction),
    )
    try:
        module, host = find_tower(model)
        layout = host.layout(module)
    except (UnsupportedModelError, ValueError):  # the tower need be none that agglo knows
        return found
    left = layout.patches if reduction.shrink is None else reduction.count() * reduction.patches_per_token
    return replace(
        found,
        n_tokens=layout.patches,
        prefix=layout.prefix,
        counts=[left] * layout.depth,
        gflops_before=layout.gflops([layout.patches] * layout.depth, layout.patches),
        gflops_after=layout.gflops([left] * layout.depth, left),
    )


@contextmanager
def trace(model: Any, passes: int = 1) -> Iterator[Trace]:
    """Record what is merged where while the model runs in this thread (or asyncio task).

    Passes of other threads are not recorded, even of those started inside the `with`; DataParallel on several devices
    runs in such threads. Tensors are detached, except the losses and masks of the latest pass.

    Args:
        model: A reduced model.
        passes: How many forward passes to keep, the latest ones.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), keep_rate=0.5, blocks=(2,))
    >>> with agglo.trace(model) as trace:
    ...     _ = model(torch.rand(1, 3, 160, 160))
    >>> trace.groupings[2].labels.shape  # after block 2, the group of every token of every image
    torch.Size([1, 101])
    """
    number("passes", passes, whole=True, minimum=1)
    applied = diffusers.applied(model) if diffusers.is_diffusion(model) else applied_modules(model)
    if not applied:
        raise ValueError(f"nothing is applied to this {type(model).__name__}: call agglo.apply(model, ...) first")
    record = Trace(limit=passes)
    with listening(record, applied):
        yield record
