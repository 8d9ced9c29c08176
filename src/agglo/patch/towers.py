"""Reduce the tower of a model: the transformer whose loop over blocks a host knows how to run in parts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from agglo.config import ReductionConfig
from agglo.hosts.common import learned
from agglo.hosts.common.base import Host, Layout, require_whole_blocks
from agglo.hosts.common.readers import Reading, ReducedReader
from agglo.hosts.common.swap import CHANGING, Applied, install, require_no_override, uninstall
from agglo.hosts.registry import find_tower
from agglo.hosts.vlm.applying import tower_reduction
from agglo.hosts.vlm.families import find_vlm
from agglo.hosts.vlm.reduction import reduced_vlms
from agglo.methods import Method, ModelShape
from agglo.plan import Plan
from agglo.schedule import Schedule, Stages


def apply_to_tower(
    model: nn.Module,
    config: ReductionConfig,
    method: Method,
    *,
    tower: str | nn.Module | None,
    probe: bool,
    by_name: bool,
) -> None:
    """Let the tower of a model run reduced, in place of any earlier reduction.

    Args:
        model: The whole model.
        config: How it is reduced.
        method: The method of the config, or the instance given in its place.
        tower: The submodule to reduce, or its name; None finds it.
        probe: Whether to compare taking blocks apart with running them whole.
        by_name: Whether the method was given by its name, so that a learned one may keep its parameters.
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
    reduction = None
    if found_vlm is not None:
        plan, reduction = tower_reduction(*found_vlm, layout, plan, config, method, host)
    loop, mixin = host.loop(module), host.mixin(module)
    grid_forwarding = host.grid_forwarding(module) if method.reads_grid else None
    with CHANGING:
        require_no_override(loop, mixin)
        if grid_forwarding is not None:
            require_no_override(module, grid_forwarding[0])
        if head is not None and head.reader is not None:
            require_no_override(head.reader, ReducedReader)
        method = learned.prepare(method, by_name, shape, model=model, tower=module, loop=loop)
        install(loop, mixin, Applied(plan, method, config))
        for reader in _readers(model, loop):
            uninstall(reader)
        if grid_forwarding is not None:
            install(module, *grid_forwarding)
        if head is not None and head.reader is not None:
            install(head.reader, ReducedReader, Reading(replace(head, reader=None), mixin))
        for former in reduced_vlms(model):
            uninstall(former)
        if found_vlm is not None and reduction is not None:
            install(found_vlm[0], found_vlm[1].mixin, reduction)


def _schedule(config: ReductionConfig, method: Method, host: Host) -> Schedule | None:
    if config.keep_rate is None:
        return config.schedule
    schedule = method.schedule(config.keep_rate, config.blocks)
    if host.rates_are_nested and isinstance(schedule, Stages) and not schedule.returning:
        return replace(schedule, nested=True)
    return schedule


def _readers(model: nn.Module, loop: nn.Module) -> list[nn.Module]:
    """Modules of the model that were given another class since they read what the loop gives."""
    readers = [module for module in model.modules() if isinstance(module, ReducedReader)]
    return [reader for reader in readers if any(part is loop for part in reader.modules())]


def _shape_of(plan: Plan, method: Method, layout: Layout) -> ModelShape:
    targets = plan.targets(method, layout.patches, layout.depth, layout.grid, strict=True)
    counts = [] if plan.schedule is None else [target for target in targets if target is not None]
    before = [layout.patches, *(counts if method.tokens_return == "never" else [layout.patches] * len(counts))]
    stages = tuple(zip(before, counts, strict=False))
    blocks = tuple(block for block, target in enumerate(targets) if target is not None)
    shape = ModelShape(stages, layout.width, layout.heads, layout.prefix, blocks, plan.place)
    method.check(shape)
    return shape
