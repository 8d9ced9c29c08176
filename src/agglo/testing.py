"""What must hold for every host, as tests that pytest runs on a host of your own. Needs pytest.

    from agglo.testing import HostContract

    class TestMyViT(HostContract):
        def model(self): return ...         # small, random weights, at least 8 blocks
        def image(self): return ...         # a batch of at least two; 3 images of 3 x 64 x 64 unless you say otherwise

Outputs may be any nesting of tensors, as transformers' output classes are. A model that is called in another way
overrides `run`. docs/hosts.md walks through a host and its test.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from agglo.grouping import Grouping
from agglo.methods import Method, Outcome, View
from agglo.patch import apply, remove, report, trace
from agglo.schedule import Constant


def tensors(output: Any) -> list[Tensor]:
    """Return all tensors of an output, in order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def assert_same(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert that outputs are bit-identical, or within a tolerance if one is given."""
    actual, expected = tensors(actual), tensors(expected)
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


def at_the_same_time(call: Callable[[Any], Any], inputs: Sequence[Any], times: int = 3) -> list[list[Any]]:
    """Call a function on each input in a separate thread, without gradients, and return all results by input."""
    barrier = threading.Barrier(len(inputs))

    def work(given: Any) -> list[Any]:
        barrier.wait()
        with torch.no_grad():  # of this thread
            return [call(given) for _ in range(times)]

    with ThreadPoolExecutor(len(inputs)) as threads:
        return list(threads.map(work, inputs))


class TakenApart(Method):
    """Reduces nothing, but makes every block run in parts, with unit sizes as a bias."""

    name: ClassVar[str] = "taken_apart"

    def reachable(self, n_tokens: int, target: int) -> int:
        return n_tokens

    def reduce(self, view: View) -> Outcome:
        return Outcome(Grouping.identity(view.tokens, view.prefix))


class HostContract:
    """The tests. `keep_rate` and `threshold` may be set to what suits a model."""

    keep_rate = 0.5
    threshold = 0.3  # at which images of the batch end with different counts

    def model(self) -> nn.Module:
        """Return a small model with random weights; yours to write."""
        raise NotImplementedError

    def image(self) -> Tensor:
        """Return a batch of at least two images."""
        return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def run(self, model: nn.Module, x: Tensor) -> Any:
        """Call the model; composite models override it."""
        return model(x)

    def run_copy(self, model: nn.Module, x: Tensor) -> Any:
        """Call a model that is going to be pickled."""
        return self.run(model, x)

    def fresh(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model().eval()
        with torch.no_grad():  # so that residual branches, LayerScale and heads that start near zero matter
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        return model

    @torch.no_grad()
    def test_keeping_everything_and_blocks_taken_apart_are_the_dense_model(self) -> None:
        model, x = self.fresh(), self.image()
        dense = self.run(model, x)
        assert_same(self.run(apply(model, keep_rate=1.0), x), dense, atol=1e-5)
        assert_same(self.run(apply(model, TakenApart(), schedule=Constant(1)), x), dense, atol=2e-5)

    @pytest.mark.parametrize("method", ["atc", "tome"])
    @torch.no_grad()
    def test_reduces_and_keeps_shapes(self, method: str) -> None:
        model, x = self.fresh(), self.image()
        dense = self.run(model, x)
        apply(model, method, keep_rate=self.keep_rate)
        found = report(model)
        assert found is not None and found.counts is not None and found.gflops_after is not None
        assert found.counts[-1] < found.n_tokens
        assert found.gflops_after < found.gflops_before
        with trace(model) as traced:
            reduced = self.run(model, x)
        assert [(t.shape, t.dtype) for t in tensors(reduced)] == [(t.shape, t.dtype) for t in tensors(dense)]
        assert not all(torch.equal(a, b) for a, b in zip(tensors(dense), tensors(reduced), strict=True))
        n_tokens = found.prefix + found.n_tokens
        for block, grouping in traced.groupings.items():
            assert grouping.n_groups == found.prefix + found.counts[block]
            assert grouping.labels.shape[1] == n_tokens
            assert torch.equal(grouping.labels[0, : found.prefix], torch.arange(found.prefix))
            torch.testing.assert_close(grouping.sizes.sum(1), torch.full((len(x),), float(n_tokens)))

    @torch.no_grad()
    def test_applying_again_replaces_and_remove_restores_everything(self) -> None:
        model, x = self.fresh(), self.image()
        before, keys, types = self.run(model, x), list(model.state_dict()), [type(m) for m in model.modules()]
        attributes = [sorted(m.__dict__) for m in model.modules()]
        once = self.run(apply(model, keep_rate=self.keep_rate), x)
        assert list(model.state_dict()) == keys
        model.load_state_dict(model.state_dict(), strict=True)
        apply(model, "tome", schedule=Constant(1))
        assert_same(self.run(apply(model, keep_rate=self.keep_rate), x), once)
        assert remove(model) is model
        assert_same(self.run(model, x), before)
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == types
        assert [sorted(m.__dict__) for m in model.modules()] == attributes
        assert report(model) is None

    def test_training_step(self) -> None:
        model, x = apply(self.fresh(), keep_rate=self.keep_rate).train(), self.image()
        dense = remove(copy.deepcopy(model))
        for one in (dense, model):
            sum(t.float().pow(2).mean() for t in tensors(self.run(one, x)) if t.requires_grad).backward()  # type: ignore[union-attr]
        wanted = {name for name, p in dense.named_parameters() if p.grad is not None}
        assert {name for name, p in model.named_parameters() if p.grad is not None} == wanted
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        assert any(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)

    @pytest.mark.parametrize("precision", ["float16", "autocast"])
    @torch.no_grad()
    def test_half_precision(self, precision: str) -> None:
        model, x, autocast = self.fresh(), self.image(), precision == "autocast"
        if not autocast:
            dtype = getattr(torch, precision)
            model, x = model.to(dtype), x.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            try:
                dense = self.run(model, x)
            except RuntimeError as error:
                pytest.skip(f"the dense model does not run in {precision}: {error}")
            reduced = self.run(apply(model, keep_rate=self.keep_rate), x)
        assert [(t.dtype, t.shape) for t in tensors(reduced)] == [(t.dtype, t.shape) for t in tensors(dense)]
        assert all(t.isfinite().all() for t in tensors(reduced) if t.is_floating_point())

    @torch.no_grad()
    def test_copies_run_themselves(self) -> None:
        model, x = apply(self.fresh(), keep_rate=self.keep_rate), self.image()
        expected = self.run_copy(model, x)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for parameter in model.parameters():
            parameter.zero_()
        for twin in copies:
            assert_same(self.run_copy(twin, x), expected)
            assert report(twin) is not None
            remove(twin)
            assert report(twin) is None
        assert report(model) is not None

    def test_threads_do_not_meet(self) -> None:
        model = apply(self.fresh(), keep_rate=self.keep_rate)
        images = [self.image() * scale for scale in (1.0, -0.5)]
        with torch.no_grad():
            expected = [self.run(model, x) for x in images]
        results = at_the_same_time(lambda x: self.run(model, x), images)
        for alone, together in zip(expected, results, strict=True):
            for result in together:
                assert_same(result, alone, atol=1e-6)

    @torch.no_grad()
    def test_threshold_gives_each_image_what_it_gets_alone(self) -> None:
        model = self.fresh()
        x = self.image()
        x[0] = x[0, :, :1, :1] + 0.01 * x[0]  # a plain image: its tokens are alike
        apply(model, threshold=self.threshold)
        with trace(model) as traced:
            together = self.run(model, x)
        counts = [grouping.counts.tolist() for grouping in traced.groupings.values() if grouping.counts is not None]
        assert any(len(set(of_images)) > 1 for of_images in counts), counts
        alone = [self.run(model, x[i : i + 1]) for i in range(len(x))]
        for whole, *parts in zip(tensors(together), *map(tensors, alone), strict=True):
            torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=2e-5)
