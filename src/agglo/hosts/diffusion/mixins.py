"""The classes that are swapped into a diffusion model: its own, with another `__call__` in front.

`__call__` and not `forward`: accelerate's and diffusers' hooks (offloading, casting) put a forward on the instance,
which Python finds before that of the class, but a call always goes to the class. So these work whichever came first,
and after `agglo.remove` nothing of ours is left inside somebody's wrapper.

A block or an attention that is called outside of a pass (of a model to which another thread applied a reduction in the
middle of its call) runs as it was. One that another thread releases in the middle of its call goes on: what runs here
looks at nothing on the module that `agglo.remove` takes away, neither its class nor methods of the mixin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from agglo.grouping import Grouping
from agglo.hosts.diffusion.family import Family
from agglo.hosts.diffusion.graphs import outside_graphs
from agglo.hosts.diffusion.plan import Plan
from agglo.hosts.diffusion.state import THREAD, AtBlock, Pass, Run, Site, generation
from agglo.hosts.swap import ReducedModule
from agglo.tracing import traces_of

Call = Callable[..., Any]


@dataclass(frozen=True)
class Setup:
    """All that `apply` decided about a denoiser: one immutable value, which a pass reads once.

    positions: of the arguments of its forward, by name.
    """

    plan: Plan
    family: Family
    positions: dict[str, int]


class ReducedPipeline(ReducedModule):
    """A pipeline: each call is a generation of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with generation():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _EqualsOriginal(type):
    """Of a swapped class: it equals the original, since pipelines ask `type(unet) in (UNet2DConditionModel,)` before
    they take a model over from another pipeline."""

    agglo_original: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__dict__.get("agglo_original")

    def __hash__(cls) -> int:
        original = cls.__dict__.get("agglo_original")
        return type.__hash__(cls) if original is None else hash(original)


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a module as its library wrote it."""
    return nn.Module.__call__(module, *args, **kwargs)


class ReducedDenoiser(ReducedModule, metaclass=_EqualsOriginal):
    """A whole model: each call is a pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return as_one_pass(self, plain_call, args, kwargs)


def with_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """The swapped class of a denoiser with a forward that is a pass too, for who calls it and not the model; with the
    signature of the original, which pipelines look at."""
    if "forward" not in vars(cls):
        original: Call = cls.forward

        @wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Without our class the model was released, and a hook still holds this function.
            if not isinstance(self, ReducedDenoiser) or (THREAD.current is not None and THREAD.current.owner is self):
                return original(self, *args, **kwargs)
            return as_one_pass(self, original, args, kwargs)

        cls.forward = forward
    return cls


def as_one_pass(model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a denoiser; its blocks find the pass in the thread."""
    setup: Setup | None = getattr(model, "agglo_setup", None)
    if setup is None:  # released by another thread a moment ago
        return call(model, *args, **kwargs)
    before = THREAD.current
    now = THREAD.current = _open(model, setup, args, kwargs)
    try:
        result = call(model, *args, **kwargs)
    finally:
        THREAD.current = before
    for trace in now.traces:
        trace.record(now.steps)
    return result


def _open(model: Any, setup: Setup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
    plan, family = setup.plan, setup.family

    def argument(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = setup.positions.get(name, len(args))
        return args[position] if position < len(args) else None

    if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise RuntimeError(
            "gradient checkpointing runs blocks a second time outside of their model's call, where agglo cannot "
            "follow: call disable_gradient_checkpointing() on the model, or agglo.remove"
        )
    run = _run(model, plan, argument("timestep")) if plan.remembers else None
    return Pass(
        owner=model,
        plan=plan,
        family=family,
        traces=traces_of(model),
        axes=family.axes(model, argument),
        places=family.places(model, argument),
        run=run,
    )


@outside_graphs
def _run(model: Any, plan: Plan, timestep: Any) -> Run:
    if THREAD.generation is None:
        raise RuntimeError(
            "every= and drift= keep groupings from one denoising step to the next, and agglo cannot tell which calls "
            "of this model are steps of one generation: give agglo.apply the whole pipeline, or put the loop inside "
            "`with agglo.generation():`"
        )
    run = THREAD.generation.run(model, plan)
    run.begin(timestep)
    return run


class ReducedBlock(ReducedModule):
    """A block: it says where the pass is, and shows the tokens that enter."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        site: Site | None = getattr(self, "agglo_site", None)
        if now is None or site is None or site.index not in now.plan.sites:
            return plain_call(self, hidden_states, *args, **kwargs)
        axes = now.family.axes_at(now.axes, site, int(hidden_states.shape[1]))
        text = 0
        if hasattr(self, "proj_mlp"):  # Flux's single blocks put the text in front of the image
            text = int((kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[0]).shape[1])
        before, now.block = now.block, AtBlock(site, hidden_states, axes, text)
        try:
            return plain_call(self, hidden_states, *args, **kwargs)
        finally:
            now.block = before


def inside_block(run: Call) -> Call:
    """A `__call__` that is given the pass and the block after self; outside of both it is the plain one."""

    def call(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        if now is None or now.block is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        return run(self, now, now.block, hidden_states, *args, **kwargs)

    return call


class ReducedCross(ReducedModule):
    """Cross-attention: one query per group."""

    @inside_block
    def __call__(self, now: Pass, at: AtBlock, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        grouping = _sharing(at.grouping, hidden_states, "cross-attention")
        if grouping is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        if kwargs.get("ip_adapter_masks") is not None:
            raise RuntimeError(
                "IP-Adapter masks say which pixels a query stands for, which a group does not: leave 'cross' out of "
                "merge="
            )
        return grouping.unmerge(plain_call(self, grouping.merge(hidden_states, now.plan.mean), *args, **kwargs))


class ReducedMlp(ReducedModule):
    """The MLP: one token per group."""

    @inside_block
    def __call__(self, now: Pass, at: AtBlock, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        grouping = _sharing(at.grouping, hidden_states, "MLP")
        if grouping is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        return grouping.unmerge(plain_call(self, grouping.merge(hidden_states, now.plan.mean), *args, **kwargs))


def _sharing(grouping: Grouping | None, hidden_states: Tensor, part: str) -> Grouping | None:
    """The grouping, if it is of these tokens; RuntimeError if they were split (feed-forward chunking)."""
    if grouping is not None and grouping.labels.shape != hidden_states.shape[:2]:
        raise RuntimeError(
            f"the {part} was called with {tuple(hidden_states.shape[:2])} tokens, where {tuple(grouping.labels.shape)} "
            "were grouped: feed-forward chunking and merge=('mlp',) do not go together"
        )
    return grouping
