"""The mixins of pipelines, denoisers and blocks: their own class, with another `__call__` in front.

`__call__` and not `forward`: accelerate's and diffusers' hooks (offloading, casting) put a forward on the instance,
which Python finds before that of the class, but a call always goes to the class. So these work whichever came first,
and after `agglo.remove` no wrapper holds a function of agglo.

A block or an attention that is called outside of a pass (of a model to which another thread applied a reduction in the
middle of its call) runs as it was. One that another thread releases in the middle of its call goes on: these mixins
read nothing on the module that `agglo.remove` takes away, neither its class nor methods of the mixin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from agglo.compiling import outside_graphs
from agglo.hosts.common.swap import ReducedModule
from agglo.hosts.diffusers.state import THREAD, CurrentBlock, DiffusionPlan, Pass, Run, Site, generation
from agglo.tracing import traces_of

Call = Callable[..., Any]


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

    agglo_original: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__dict__.get("agglo_original")

    def __hash__(cls) -> int:
        original = cls.__dict__.get("agglo_original")
        return type.__hash__(cls) if original is None else hash(original)


class ReducedDenoiser(ReducedModule, metaclass=_EqualsOriginal):
    """A whole model each of whose calls is a pass."""

    def __init_subclass__(cls) -> None:
        """Let a direct call of `forward` be a pass too, with the original's signature, which pipelines look at."""
        super().__init_subclass__()
        original: Call | None = getattr(vars(cls).get("agglo_original"), "forward", None)
        if original is None:
            return

        @wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Without our class the model was released, and a hook still holds this function.
            if not isinstance(self, ReducedDenoiser) or (THREAD.current is not None and THREAD.current.owner is self):
                return original(self, *args, **kwargs)
            return as_one_pass(self, original, args, kwargs)

        cls.forward = forward  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return as_one_pass(self, plain_call, args, kwargs)


def as_one_pass(model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a denoiser; its blocks find the pass in the thread."""
    plan: DiffusionPlan | None = getattr(model, "agglo_applied", None)
    if plan is None:  # released by another thread a moment ago
        return call(model, *args, **kwargs)
    before = THREAD.current
    now = THREAD.current = _open(model, plan, args, kwargs)
    try:
        result = call(model, *args, **kwargs)
    finally:
        THREAD.current = before
    for trace in now.traces:
        trace.record(now.steps)
    return result


def _open(model: Any, plan: DiffusionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
    def argument(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = plan.arguments.get(name, len(args))
        return args[position] if position < len(args) else None

    if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise RuntimeError(
            "gradient checkpointing runs blocks a second time outside of their model's call, where agglo cannot "
            "follow: call disable_gradient_checkpointing() on the model, or agglo.remove"
        )
    run = _run(model, plan, argument("timestep")) if plan.remembers else None
    axes, ids = plan.family.axes(model, argument), plan.family.ids(model, argument)
    return Pass(model, plan, traces_of(model), axes, ids, run)


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

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        site: Site | None = getattr(self, "agglo_applied", None)
        if now is None or site is None or site.index not in now.plan.sites:
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
            raise RuntimeError(
                f"a part of a block was called with {tuple(hidden_states.shape[:2])} tokens, where "
                f"{tuple(grouping.labels.shape)} were grouped: feed-forward chunking and merge=('mlp',) do not go "
                "together"
            )
        if kwargs.get("ip_adapter_masks") is not None:
            raise RuntimeError(
                "IP-Adapter masks say which pixels a query stands for, which a group does not: leave 'cross' out of "
                "merge="
            )
        return grouping.unmerge(plain_call(self, grouping.merge(hidden_states, now.plan.mean), *args, **kwargs))
