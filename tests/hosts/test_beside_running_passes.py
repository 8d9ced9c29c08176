"""apply, remove and trace while other threads run the model: every pass is of one piece."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.methods.atc import ATC
from agglo.testing import assert_same, tensors
from tests.support.class_heads import ONE_OF_EACH, build
from tests.support.processes import HANGS

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
every_host = pytest.mark.parametrize("name", ONE_OF_EACH)


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    return tensors(model(IMAGE))[0]


TURNS = 15


class Interrupting(ATC):
    """ATC that lets somebody do something in the middle of the pass."""

    def __init__(self, interruption: Callable[[], object]) -> None:
        super().__init__()
        self.interruption = interruption

    def reduce(self, view: agglo.methods.View) -> agglo.methods.Outcome:
        self.interruption()
        return super().reduce(view)


@pytest.mark.parametrize("last_block", ["all", "class_token"])
@every_host
def test_a_pass_that_has_begun_goes_on_as_it_began(name: str, last_block: str) -> None:
    model = build(name)
    dense = run(model)
    halved = run(agglo.apply(model, keep_rate=0.5))
    tome = run(agglo.apply(model, "tome", keep_rate=0.7))
    assert not torch.allclose(halved, dense)
    assert not torch.allclose(halved, tome)
    for change, after in (
        (lambda: agglo.remove(model), dense),
        (lambda: agglo.apply(model, "tome", keep_rate=0.7), tome),
        (lambda: agglo.apply(agglo.remove(model), "tome", keep_rate=0.7, last_block=last_block), tome),
    ):
        agglo.apply(model, Interrupting(change), keep_rate=0.5, last_block=last_block)
        assert_same(run(model), halved, atol=2e-5)
        assert_same(run(model), after, atol=2e-5)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_every_output_is_of_one_state(name: str) -> None:
    model = build(name)
    changes: list[Callable[[], object]] = [
        lambda: agglo.remove(model),
        lambda: agglo.apply(model, keep_rate=0.5),
        lambda: agglo.apply(model, "tome", keep_rate=0.7, proportional=False),
        lambda: agglo.apply(model, "sit", keep_rate=0.5, blocks=(1, 2)),
        lambda: agglo.apply(model, keep_rate=0.3, blocks=(1,)),
    ]
    known: list[Tensor] = []
    for change in changes:
        torch.manual_seed(0)  # for what sit starts with, which remove takes away with it
        change()
        known.append(run(model))
    done, seen = threading.Event(), set[int]()

    def watch() -> None:
        while not done.is_set():
            output = run(model)
            matches = [index for index, expected in enumerate(known) if torch.allclose(output, expected, atol=1e-5)]
            assert matches, "an output of no known state"
            seen.update(matches)

    turn, hangs = 0, time.monotonic() + HANGS
    with ThreadPoolExecutor(3) as executor:
        watchers = [executor.submit(watch) for _ in range(3)]
        while (turn < TURNS or len(seen) < 2) and time.monotonic() < hangs:
            torch.manual_seed(0)
            changes[turn % len(changes)]()
            turn += 1
        done.set()
        for watcher in watchers:
            watcher.result()
    assert len(seen) > 1


@every_host
def test_a_pass_between_the_call_and_its_first_look(name: str) -> None:
    """Python has looked up the reduced forward, and then the reduction is removed."""
    model = build(name)
    dense = run(model)
    agglo.apply(model, keep_rate=0.5)
    held: Any = next(module for module in model.modules() if hasattr(module, "agglo_applied"))
    looked_up = held.forward
    agglo.remove(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        del held.forward
        return looked_up(*args, **kwargs)

    held.forward = forward
    assert torch.equal(run(model), dense)


def in_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(work).result()


def test_a_trace_belongs_to_the_thread_that_opened_it() -> None:
    model = agglo.apply(build("timm"), keep_rate=0.5)

    def other() -> None:
        run(model)
        with agglo.trace(model, passes=9) as theirs:
            run(model)
            run(model)
        assert len(theirs.passes) == 2

    with agglo.trace(model, passes=9) as ours:
        in_thread(other)
        assert ours.passes == []
        with pytest.raises(RuntimeError, match="nothing was traced"):
            _ = ours.steps
        run(model)
    assert len(ours.passes) == 1
    run(model)
    assert len(ours.passes) == 1


def test_a_trace_closed_in_another_context_is_closed() -> None:
    model = agglo.apply(build("timm"), keep_rate=0.5)

    def passes() -> Iterator[int]:
        with agglo.trace(model) as trace:
            while True:
                run(model)
                yield len(trace.passes)

    generator = passes()
    assert contextvars.copy_context().run(next, generator) == 1
    contextvars.copy_context().run(generator.close)  # type: ignore[attr-defined]
    run(model)


class Held:
    """What autograd keeps for the backward pass, here in a box whose end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would hold itself


def test_an_epoch_in_a_trace_holds_one_graph_at_most() -> None:
    model = agglo.apply(build("timm"), "dynamicvit", keep_rate=0.5).train()
    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Held:
        alive.add(held := Held(tensor))
        return held

    held_after = []
    with (
        agglo.trace(model, passes=3) as trace,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor),
    ):
        for _ in range(5):
            model(IMAGE)
            held_after.append(len(alive))
    assert all(count == held_after[0] for count in held_after)
    assert held_after[0] > 0
    assert len(trace.passes) == 3
    latest, kept = trace.steps[-1].outcome, trace.passes[-1][-1].outcome
    assert latest.loss is not None and kept.loss is not None
    assert latest.loss.requires_grad and not kept.loss.requires_grad
    assert torch.equal(kept.loss, latest.loss)
    tensors = [getattr(latest, name) for name in ("tokens", "weights")] + [trace.steps[-1].total.sizes]
    assert not any(tensor.requires_grad for tensor in tensors if tensor is not None)


def test_a_compiled_model_is_traced_and_compiled_for_it_once() -> None:
    from torch._dynamo.testing import CompileCounter

    model = build("timm")
    del model.blocks[2:]
    agglo.apply(model, "tome", keep_rate=0.5, blocks=(0,))
    expected = run(model)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    torch.testing.assert_close(run(compiled), expected)
    for _ in range(10):
        with agglo.trace(model) as trace:
            torch.testing.assert_close(run(compiled), expected)
        assert len(trace.passes) == 1
    assert counter.frame_count == 2
    with agglo.trace(model, passes=12) as trace:
        for _ in range(15):
            run(compiled)
    assert len(trace.passes) == 12
    with agglo.trace(model) as eager:
        run(model)
    assert trace.passes[-1][-1].total.labels.tolist() == eager.steps[-1].total.labels.tolist()
    in_thread(lambda: run(compiled))
    run(compiled)
    assert len(trace.passes) == 12
