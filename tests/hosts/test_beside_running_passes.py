"""apply, remove and trace while other threads run the model: every pass is of one piece."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.methods.atc import ATC
from tests.support.processes import HANGS

timm_vit = pytest.importorskip("timm.models.vision_transformer")

SIZES = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}
TURNS = 30
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def spread(model: nn.Module) -> nn.Module:
    """Weights large enough that every reduction gives its own output."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


def timm_deit() -> nn.Module:
    return spread(timm_vit.VisionTransformer(**SIZES))


def timm_mean_pooled() -> nn.Module:
    return spread(timm_vit.VisionTransformer(**SIZES, global_pool="avg"))


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return spread(models.VisionTransformer(32, 4, 4, 4, 32, 64, num_classes=5))


def open_clip_vit() -> nn.Module:
    transformer = pytest.importorskip("open_clip.transformer")
    return spread(transformer.VisionTransformer(32, 4, 32, 4, 4, 2.0, output_dim=5))


def transformers_sizes() -> dict[str, int]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 4,
    }


def transformers_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return spread(transformers.ViTModel(transformers.ViTConfig(**transformers_sizes())))


def transformers_dino() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return spread(transformers.Dinov2Model(transformers.Dinov2Config(**transformers_sizes())))


HOSTS = [timm_deit, timm_mean_pooled, torchvision_vit, open_clip_vit, transformers_vit, transformers_dino]


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    output: Any = model(IMAGE)
    return output if isinstance(output, Tensor) else output.last_hidden_state


class Interrupting(ATC):
    """ATC that lets somebody do something in the middle of the pass."""

    def __init__(self, interruption: Callable[[], object]) -> None:
        super().__init__()
        self.interruption = interruption

    def reduce(self, view: agglo.methods.View) -> agglo.methods.Outcome:
        self.interruption()
        return super().reduce(view)


@pytest.mark.parametrize("host", HOSTS)
def test_a_pass_that_has_begun_goes_on_as_it_began(host: Callable[[], nn.Module]) -> None:
    model = host()
    dense = run(model)
    halved = run(agglo.apply(model, keep_rate=0.5))
    tome = run(agglo.apply(model, "tome", keep_rate=0.7))
    assert not torch.allclose(halved, dense)
    assert not torch.allclose(halved, tome)
    for change, after in (
        (lambda: agglo.remove(model), dense),
        (lambda: agglo.apply(model, "tome", keep_rate=0.7), tome),
        (lambda: agglo.apply(agglo.remove(model), "tome", keep_rate=0.7), tome),
    ):
        agglo.apply(model, Interrupting(change), keep_rate=0.5)
        assert torch.equal(run(model), halved)
        assert torch.equal(run(model), after)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("host", HOSTS)
def test_every_output_is_of_one_state(host: Callable[[], nn.Module]) -> None:
    model = host()
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
    done, failures, seen = threading.Event(), list[BaseException](), set[int]()

    def watch() -> None:
        try:
            while not done.is_set():
                output = run(model)
                matches = [index for index, expected in enumerate(known) if torch.allclose(output, expected, atol=1e-5)]
                assert matches, "an output of no known state"
                seen.update(matches)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=watch) for _ in range(3)]
    for thread in threads:
        thread.start()
    turn, hangs = 0, time.monotonic() + HANGS
    while not failures and (turn < TURNS or len(seen) < 2) and time.monotonic() < hangs:
        torch.manual_seed(0)
        changes[turn % len(changes)]()
        turn += 1
    done.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert len(seen) > 1


@pytest.mark.parametrize("host", HOSTS)
def test_a_pass_between_the_call_and_its_first_look(host: Callable[[], nn.Module]) -> None:
    """Python has looked up the reduced forward, and then the reduction is removed."""
    model = host()
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


def test_signatures_are_the_dense_models() -> None:
    model = timm_deit()
    names = ("forward", "forward_features", "forward_intermediates")
    dense = [list(inspect.signature(getattr(model, name)).parameters) for name in names]
    agglo.apply(model, keep_rate=0.5)
    assert [list(inspect.signature(getattr(model, name)).parameters) for name in names] == dense


def in_thread(work: Callable[[], object]) -> None:
    failures: list[BaseException] = []

    def careful() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=careful)
    thread.start()
    thread.join()
    assert not failures, failures


def test_a_trace_belongs_to_the_thread_that_opened_it() -> None:
    model = agglo.apply(timm_deit(), keep_rate=0.5)

    def other() -> None:
        run(model)
        with agglo.trace(model, passes=9) as theirs:
            run(model)
            run(model)
        assert len(theirs.passes) == 2

    with agglo.trace(model, passes=9) as ours:
        in_thread(other)
        assert ours.passes == []
        with pytest.raises(RuntimeError, match=r"nothing was traced: .* in the same thread"):
            _ = ours.steps
        run(model)
    assert len(ours.passes) == 1
    run(model)
    assert len(ours.passes) == 1


def test_threads_trace_one_model_at_the_same_time() -> None:
    model = agglo.apply(timm_vit.VisionTransformer(**SIZES, dynamic_img_size=True).eval(), keep_rate=0.5)
    barrier, found = threading.Barrier(4), dict[int, list[int]]()

    def work(side: int) -> None:
        barrier.wait()
        with torch.no_grad(), agglo.trace(model, passes=20) as trace:
            for _ in range(8):
                model(torch.randn(1, 3, side, side))
        found[side] = [int(steps[0].total.labels.shape[1]) for steps in trace.passes]

    threads = [threading.Thread(target=work, args=(side,)) for side in (16, 24, 32, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {side: [1 + (side // 4) ** 2] * 8 for side in (16, 24, 32, 40)}


def test_a_context_can_be_handed_on() -> None:
    model = agglo.apply(timm_deit(), keep_rate=0.5)
    with agglo.trace(model, passes=9) as trace:
        context = contextvars.copy_context()
        in_thread(lambda: context.run(run, model))
    assert len(trace.passes) == 1


def test_asyncio_tasks_have_traces_of_their_own() -> None:
    model = agglo.apply(timm_deit(), keep_rate=0.5)

    async def task(n_passes: int) -> int:
        with agglo.trace(model, passes=9) as trace:
            for _ in range(n_passes):
                await asyncio.to_thread(run, model)
                await asyncio.sleep(0)
        return len(trace.passes)

    async def both() -> list[int]:
        return await asyncio.gather(task(2), task(3))

    assert asyncio.run(both()) == [2, 3]


def test_traces_inside_traces_and_of_several_models() -> None:
    first, second = (agglo.apply(timm_deit(), keep_rate=rate) for rate in (0.5, 0.7))
    both = nn.ModuleList([first, second])
    with agglo.trace(both, passes=9) as outer:
        run(first)
        with agglo.trace(second, passes=9) as inner:
            run(first)
            run(second)
            agglo.apply(second, "tome", keep_rate=0.5)
            run(second)
    assert (len(outer.passes), len(inner.passes)) == (4, 2)


def test_a_trace_closed_elsewhere_is_closed() -> None:
    """A generator that holds a trace open may be closed in another context."""
    model = agglo.apply(timm_deit(), keep_rate=0.5)

    def passes() -> Iterator[int]:
        with agglo.trace(model) as trace:
            while True:
                run(model)
                yield len(trace.passes)

    generator = passes()
    assert contextvars.copy_context().run(next, generator) == 1
    contextvars.copy_context().run(generator.close)  # type: ignore[attr-defined]
    run(model)


def test_how_many_passes_are_kept() -> None:
    model = agglo.apply(timm_deit(), keep_rate=0.5)
    for kept in (1, 3):
        with agglo.trace(model, passes=kept) as trace:
            for _ in range(5):
                run(model)
        assert len(trace.passes) == kept
    for wrong in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match=f"passes={wrong}"), agglo.trace(model, passes=wrong):  # type: ignore[arg-type]
            pass


class Held:
    """What autograd keeps for the backward pass, here in a box whose end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would hold itself


@pytest.mark.parametrize(("method", "has_loss"), [("atc", False), ("sit", False), ("dynamicvit", True), ("svit", True)])
def test_an_epoch_in_a_trace_holds_one_graph_at_most(method: str, has_loss: bool) -> None:
    model = agglo.apply(timm_deit(), method, keep_rate=0.5).train()
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
    assert (held_after[0] > 0) == has_loss
    assert len(trace.passes) == 3
    latest, kept = trace.steps[-1].outcome, trace.passes[-1][-1].outcome
    assert (trace.loss is not None) == has_loss
    if has_loss:
        assert latest.loss is not None
        assert kept.loss is not None
        assert latest.loss.requires_grad
        assert torch.equal(kept.loss, latest.loss)
        assert not kept.loss.requires_grad
    tensors = [getattr(latest, name) for name in ("tokens", "weights")] + [trace.steps[-1].total.sizes]
    assert not any(tensor.requires_grad for tensor in tensors if tensor is not None)


def test_copies_made_inside_a_trace_are_not_traced() -> None:
    model = agglo.apply(timm_deit(), keep_rate=0.5)
    with agglo.trace(model) as trace:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            run(twin)
        assert trace.passes == []


@pytest.mark.parametrize("method", ["tome", "patch_merger"])
def test_a_compiled_model_is_traced_and_compiled_for_it_once(method: str) -> None:
    from torch._dynamo.testing import CompileCounter

    model = agglo.apply(timm_deit(), method, keep_rate=0.5)
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
