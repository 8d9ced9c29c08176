"""A look at what was merged where: `with agglo.trace(model) as t: model(x)`.

A trace belongs to the context that opened it (`contextvars`: a thread, or an asyncio task), and sees the passes that
run there. Other threads have contexts of their own, also those in which DataParallel runs its replicas;
`asyncio.to_thread` and `contextvars.copy_context().run` hand the context on, and the trace with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from agglo.grouping import Grouping
from agglo.methods import Outcome

T = TypeVar("T", Grouping, Outcome)


@dataclass(frozen=True)
class Step:
    """One reduction: at which block, what the method decided about the tokens there, and all reductions so far."""

    block: int
    outcome: Outcome
    total: Grouping


class _Kept:
    """The steps of one pass, empty at first.

    torch.compile guards on how long a list is and on the types in it, never on what an attribute holds that no graph
    reads. With a slot for every pass that is kept, a compiled model need not be compiled again as they fill.
    """

    def __init__(self, steps: list[Step] | None = None) -> None:
        self.steps = steps


class Trace:
    """What forward passes reported, one list of steps per pass, each whole even when several threads run the model.

    `steps`, `groupings` and `loss` are of the latest pass. Only there do losses and masks carry gradients; everything
    else is detached, so that a trace around an epoch holds no graph but the latest.

    limit: how many passes are kept.
    """

    def __init__(self, limit: int = 1) -> None:
        self._kept = [_Kept() for _ in range(limit)]
        self._latest: list[Step] | None = None

    def record(self, steps: Sequence[Step]) -> None:
        """Add a pass, at the end of its loop over blocks."""
        self._latest = [_detached(step, "tokens", "weights") for step in steps]
        without = [_detached(step, "tokens", "weights", "loss", "policy", "processed") for step in steps]
        self._kept.append(_Kept(without))
        del self._kept[0]

    @property
    def passes(self) -> list[list[Step]]:
        """Return the steps of the latest passes, oldest first, without gradients."""
        return [kept.steps for kept in self._kept if kept.steps is not None]

    @property
    def steps(self) -> list[Step]:
        """Return the reductions of the latest pass, in order."""
        if self._latest is None:
            raise RuntimeError(
                "nothing was traced: run the model inside `with agglo.trace(model) as t:`, in the same thread "
                "(DataParallel on several devices runs its replicas in threads of their own)"
            )
        return self._latest

    @property
    def groupings(self) -> dict[int, Grouping]:
        """Return the group of each original token, prefix tokens first, by the block after which it holds."""
        return {step.block: step.total for step in self.steps}

    @property
    def loss(self) -> Tensor | None:
        """Return the methods' extra losses of the latest pass, summed; None where there are none."""
        losses = [step.outcome.loss for step in self.steps if step.outcome.loss is not None]
        return sum(losses[1:], start=losses[0]) if losses else None


def _detached(step: Step, *names: str) -> Step:
    """Return the step without the graph behind its groupings, and behind the named tensors of its outcome."""
    outcome = _without_graph(step.outcome, *names)
    outcome = replace(outcome, grouping=_without_graph(outcome.grouping, "sizes", "weights"))
    return replace(step, outcome=outcome, total=_without_graph(step.total, "sizes", "weights"))


def _without_graph(value: T, *names: str) -> T:
    tensors: dict[str, Any] = {name: getattr(value, name) for name in names}
    return replace(value, **{name: tensor.detach() for name, tensor in tensors.items() if tensor is not None})


_open_here: ContextVar[tuple[tuple[Trace, tuple[nn.Module, ...]], ...]] = ContextVar("agglo_traces", default=())
_open_anywhere = 0
any_open = False  # apart from the number, so that torch.compile compiles for two cases only
_counting = threading.Lock()


def traces_of(module: nn.Module) -> tuple[Trace, ...]:
    """Return the traces that record a pass of the module that begins now."""
    # The flag comes first: torch.compile can guard on it in every version, but on context variables only in new ones.
    if not any_open:
        return ()
    return tuple([trace for trace, modules in _open_here.get() if any(each is module for each in modules)])


@contextmanager
def listening(trace: Trace, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let a trace record the modules' passes in this context."""
    _open_here.set((*_open_here.get(), (trace, tuple(modules))))
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        # Not by token: a generator may be closed in another context than the one that started it.
        _open_here.set(tuple([entry for entry in _open_here.get() if entry[0] is not trace]))


def _count(change: int) -> None:
    global _open_anywhere, any_open
    with _counting:
        _open_anywhere += change
        any_open = _open_anywhere > 0
