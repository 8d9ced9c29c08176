"""The mixins of pipelines, denoisers and blocks: their own class, with another `__call__` in front.

`__call__` and not `forward`: accelerate's and diffusers' hooks (offloading, casting) put a forward on the instance,
which Python finds before that of the class, but a call always goes to the class. So these work whichever came first,
and after `agglo.remove` no wrapper holds a function of agglo.

A block or an attention that is called outside of a pass (of a model to which another thread applied a reduction in the
middle of its call) runs as it was. One that another thread releases in the middle of its call continues: the mixins of
attentions read nothing on the module that `agglo.remove` takes away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agglo.compiling import outside_graphs
from agglo.hosts.common.swap import ReducedModule, begins_pass
from agglo.hosts.diffusers.state import THREAD, CurrentBlock, DiffusionPlan, Pass, Run, Site, generation
from agglo.tracing import traces_of


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module as its library wrote it."""
    return nn.Module.__call__(module, *args, **kwargs)


class ReducedPipeline(ReducedModule):
    """A pipeline each of whose calls is a generation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with generation():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _EqualsOriginal(type):
    """The metaclass of a swapped class, which equals the original.

    Pipelines ask `type(unet) in (UNet2DConditionModel,)` before they take a model over from another pipeline.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__dict__.get("agglo_original")

    def __hash__(cls) -> int:
        original = cls.__dict__.get("agglo_original")
        return type.__hash__(cls) if original is None else hash(original)


class ReducedDenoiser(ReducedModule, metaclass=_EqualsOriginal):
    """A whole model each of whose calls is a pass, which its blocks find in the thread."""

    @begins_pass
    def __call__(self: Any, plan: DiffusionPlan, *args: Any, **kwargs: Any) -> Any:
        return _as_one_pass(self, plan, nn.Module.__call__, args, kwargs)

    @begins_pass
    def forward(self: Any, plan: DiffusionPlan, *args: Any, **kwargs: Any) -> Any:
        """Open a pass where `__call__` did not: torch.compile holds that of the class before `agglo.apply`."""
        if THREAD.current is not None and THREAD.current.model is self:
            return plan.owner.forward(self, *args, **kwargs)
        return _as_one_pass(self, plan, plan.owner.forward, args, kwargs)


def _as_one_pass(model: Any, plan: DiffusionPlan, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = THREAD.current
    now = THREAD.current = _open(model, plan, {**dict(zip(plan.arguments, args, strict=False)), **kwargs})
    try:
        result = call(model, *args, **kwargs)
    finally:
        THREAD.current = before
    for trace in now.traces:
        trace.record(now.steps)
    return result


def _open(model: Any, plan: DiffusionPlan, given: dict[str, Any]) -> Pass:
    if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise RuntimeError(
            "gradient checkpointing runs blocks a second time outside of their model's call, where agglo cannot "
            "follow: call disable_gradient_checkpointing() on the model, or agglo.remove"
        )
    outlive = plan.config.every > 1 or plan.config.drift is not None
    run = _run(model, plan, given.get("timestep")) if outlive else None
    return Pass(model, plan, traces_of(model), plan.family.axes(model, given), plan.family.ids(model, given), run)


@outside_graphs
def _run(model: Any, plan: DiffusionPlan, timestep: Any) -> Run:
    """Return the run of this model in this generation; a new one after another `apply`."""
    if THREAD.runs is None:
        raise RuntimeError(
            "every= and drift= keep groupings from one denoising step to the next, and agglo cannot tell which calls "
            "of this model are steps of one generation: give agglo.apply the whole pipeline, or put the loop inside "
            "`with agglo.hosts.diffusers.generation():`"
        )
    run = THREAD.runs.get(id(model))
    if run is None or run.plan is not plan:
        run = THREAD.runs[id(model)] = Run(model, plan)
    run.begin(timestep)
    return run


class ReducedBlock(ReducedModule):
    """A block, which puts itself and the tokens that enter it into the pass."""

    @begins_pass
    def __call__(self: Any, site: Site, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        if now is None or site.index not in now.plan.sites:
            return plain_call(self, hidden_states, *args, **kwargs)
        axes = now.plan.family.axes_at(now.axes, site, int(hidden_states.shape[1]))
        text = 0
        if hasattr(self, "proj_mlp"):  # Flux's single blocks put the text in front of the image
            text = int((kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[0]).shape[1])
        before, now.block = now.block, CurrentBlock(site, hidden_states, axes, text)
        try:
            return plain_call(self, hidden_states, *args, **kwargs)
        finally:
            now.block = before


class ReducedPart(ReducedModule):
    """A cross-attention or an MLP that runs with one token per group."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        grouping = None if now is None or now.block is None else now.block.grouping
        if now is None or grouping is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        if grouping.labels.shape != hidden_states.shape[:2]:
            raise RuntimeError("feed-forward chunking gives an MLP other tokens than were grouped: leave 'mlp' out")
        if kwargs.get("ip_adapter_masks") is not None:
            raise RuntimeError("IP-Adapter masks say which pixels a query stands for: leave 'cross' out of merge=")
        return grouping.unmerge(plain_call(self, grouping.merge(hidden_states, now.plan.mean), *args, **kwargs))
