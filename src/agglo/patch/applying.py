"""`apply` and `remove`, dispatched by the kind of model: a tower, a vision-language model, or a diffusion model."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar, cast

from torch import nn

from agglo import tuned as tuned_results
from agglo.checks import flag
from agglo.config import DIFFUSION_FIELDS, ReductionConfig
from agglo.hosts import diffusers
from agglo.hosts.common import learned
from agglo.hosts.common.base import Host, Layout, require_whole_blocks
from agglo.hosts.common.swap import (
    CHANGING,
    Applied,
    Reading,
    ReducedModule,
    ReducedReader,
    Setting,
    install,
    require_no_override,
    uninstall,
)
from agglo.hosts.registry import applied_modules, find_tower
from agglo.hosts.vlm import applying as vlm
from agglo.hosts.vlm.families import find_vlm
from agglo.hosts.vlm.processors import AdaptedProcessor, restored
from agglo.hosts.vlm.reduction import reduced_vlms
from agglo.methods import Method, ModelShape
from agglo.plan import Plan
from agglo.schedule import Schedule, Stages
from agglo.text import parse_call

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
        keep_rate: fraction of patch tokens that stays at each stage, in (0, 1]; a list gives one per stage. Or one of
            `schedule` and `threshold`.
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
    chosen = method if isinstance(method, Method) else config.create_method()
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
    reduction = vlm.late_reduction(module, family, config, chosen)
    with CHANGING:
        require_no_override(module, family.mixin)
        for former in applied_modules(whole):
            uninstall(former)
        install(module, family.mixin, reduction)
    return model


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
    head = host.head(model, module) if config.last_block == "class_token" else None
    plan = Plan(
        schedule=_schedule(config, method, host),
        threshold=config.threshold,
        blocks=config.blocks,
        proportional=method.proportional if config.proportional is None else config.proportional,
        grid=layout.grid,
        place=config.place or method.place,
        reads=None if head is None else head.reads,
        ends=(layout.prefix - layout.suffix, layout.suffix),
    )
    shape = _shape_of(plan, method, layout)  # an impossible request raises here, before anything changes
    further: list[tuple[nn.Module, type[ReducedModule], Setting]] = []
    if found_vlm is not None:
        plan, reduction = vlm.tower_reduction(*found_vlm, layout, plan, config, method, host)
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
        for former in [*_readers(model, loop), *reduced_vlms(model)]:
            uninstall(former)
        for each, override, setting in further:
            install(each, override, setting)


def _schedule(config: ReductionConfig, method: Method, host: Host) -> Schedule | None:
    if config.keep_rate is None:
        return config.schedule
    schedule = method.schedule(config.keep_rate, config.blocks)
    if host.rates_are_nested and isinstance(schedule, Stages) and not schedule.returning:
        return replace(schedule, nested=True)
    return schedule


def _readers(model: nn.Module, loop: nn.Module) -> list[nn.Module]:
    """Return modules of the model that were given another class since they read what the loop gives."""
    parts = [each for each in model.modules() if isinstance(each, ReducedReader)]
    return [each for each in parts if any(part is loop for part in each.modules())]


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
    learned are taken out too: save the state dict first, or keep the instance, which can be applied again. Returns the
    model.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), keep_rate=0.5)
    >>> print(agglo.report(agglo.remove(model)))
    None
    """
    with CHANGING:
        if diffusers.is_diffusion(model):
            diffusers.remove(model)
            return model
        if isinstance(model, AdaptedProcessor):
            restored(model)
            return model
        for module in applied_modules(cast(nn.Module, model)):
            uninstall(module)
    return model
