"""The model that is tuned: reduced in one way after another, compared with what it was, and timed beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agglo.experiments.evaluation.turns import seconds_in_turns, seconds_per_pass
from agglo.experiments.outputs import named_tensors
from agglo.experiments.slicing import Slice
from agglo.hosts.diffusion import is_diffusion
from agglo.hosts.registry import applied_modules, find_tower
from agglo.patching import apply, reduction, remove, trace
from agglo.schedule import Counts
from agglo.tuning.images import Batch, Images, moved, tensors_in
from agglo.tuning.objectives import Objective, objective_named
from agglo.tuning.outputs import Output, objective_for, output_of
from agglo.tuning.statistics import Quality

_BETWEEN_DENSE = 4  # ways that are timed between two passes of the dense model
_LEAST_SECONDS = 0.04  # a timing shorter than this runs the model several times

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """gflops: relative to dense. counts: patch tokens left after each block. pairs: see `time_model.Timed`."""

    gflops: float
    counts: list[int]
    pairs: float


class Subject:
    """model: in eval mode and dense between calls.

    tokens: patch tokens of an image; those of the model's own size where images differ.
    any_size: whether images differ in their number of tokens, so that a schedule must be of fractions.
    depth, prefix: of the transformer; depth is None for a diffusion model, which takes one keep rate.
    decides: whether the highest output is a decision.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        *,
        output: Output | None,
        objective: str | Objective,
        tower: str | None,
        n_tokens: int | None,
    ) -> None:
        self.model, self.images, self.tower = model, images, tower
        like = next(model.parameters())
        self.device, self.dtype = like.device, like.dtype
        self._output = output_of(model) if output is None else output
        self._dense: dict[int, Any] = {}
        self._costs: dict[str, Cost] = {}
        self._passes: int | None = None
        self.diffusion = is_diffusion(model)
        name, tensors = named_tensors(self._run(images.search[0]))
        if objective == "auto":
            objective = objective_for(model, name, tensors, images.has_labels)
        self.objective = objective if isinstance(objective, str) else getattr(objective, "__name__", "its own")
        self._distance = objective_named(objective)
        self.decides = objective == "kl" and isinstance(tensors, Tensor) and tensors.dim() == 2
        self.has_labels = images.has_labels and self.decides
        self.depth: int | None = None
        self.prefix, self.any_size = 0, False
        if self.diffusion:
            apply(model, "atc", keep_rate=1.0)
            found = reduction(model, n_tokens)
            assert found is not None
            self.tokens = found.n_tokens
            remove(model)
        else:
            self._look(n_tokens)

    def _look(self, n_tokens: int | None) -> None:
        """How many tokens images have, seen by a pass that takes one token away."""
        module, host = find_tower(self.model, self.tower)
        layout = host.layout(module)
        self.depth, self.prefix = layout.depth, layout.prefix
        if layout.depth < 2:
            raise ValueError(f"a transformer of depth {layout.depth} leaves nothing to tune")
        seen = set()
        apply(self.model, Slice(), schedule=[1], proportional=False, **self._where)
        try:
            for batch in self._of_each_shape():
                with trace(self.model) as record:
                    self._run(batch)
                seen.add(int(record.steps[0].outcome.grouping.labels.shape[1]) - layout.prefix)
                if len(seen) > 1:
                    break
        except RuntimeError as error:
            if "nothing was traced" in str(error):
                raise ValueError("output= does not run the transformer that is to be reduced") from None
            raise
        finally:
            remove(self.model)
        self.any_size = len(seen) > 1
        self.tokens = n_tokens or (layout.patches if self.any_size else seen.pop())

    def _of_each_shape(self) -> list[Batch]:
        """One batch of every shape that images have, their number aside."""
        batches = (*self.images.search, *self.images.confirmation)
        return list({str([tensor.shape[-3:] for tensor in tensors_in(b.inputs)]): b for b in batches}.values())

    @property
    def _where(self) -> dict[str, Any]:
        return {} if self.tower is None else {"tower": self.tower}

    def apply(self, arguments: Arguments | None) -> None:
        """The model reduced by keyword arguments of `agglo.apply`; None is the dense model."""
        if arguments is None:
            remove(self.model)
        else:
            apply(self.model, **{**self._where, **arguments})

    def require_runs(self, arguments: Arguments) -> None:
        """ValueError where the model cannot be reduced so: most is found out by applying, some only by running it."""
        self.apply(arguments)
        try:
            self._run(self.images.search[0])
        finally:
            remove(self.model)

    def cost(self, arguments: Arguments) -> Cost:
        """What a reduction costs, without running it; ValueError where it cannot be applied."""
        key = str(arguments)
        if key not in self._costs:
            self._costs[key] = self._cost(arguments)
        return self._costs[key]

    def _cost(self, arguments: Arguments) -> Cost:
        try:
            self.apply(arguments)
            found = reduction(self.model, self.tokens)
            assert found is not None and found.counts is not None and found.gflops_after is not None
        finally:
            remove(self.model)
        gflops = found.gflops_after / found.gflops_before
        if self.diffusion:
            before = [level.tokens for level in found.levels for _ in range(level.attentions)]
            after = [level.groups for level in found.levels for _ in range(level.attentions)]
            pairs = sum((n / found.n_tokens) ** 2 for n, k in zip(before, after, strict=True) if k < n)
            return Cost(gflops, found.counts, pairs)
        all_counts = [found.n_tokens, *found.counts]
        pairs = sum((a / found.n_tokens) ** 2 for a, b in zip(all_counts, found.counts, strict=False) if b < a)
        return Cost(gflops, found.counts, pairs)

    def quality(self, arguments: Arguments, batches: Sequence[Batch]) -> Quality:
        """How far the outputs of these batches are from the dense model's; ValueError where they are not numbers."""
        expected = [self._dense_output(batch) for batch in batches]
        total: Quality | None = None
        self.apply(arguments)
        try:
            for batch, dense in zip(batches, expected, strict=True):
                found = self._compared(batch, dense, named_tensors(self._run(batch))[1])
                total = found if total is None else total + found
        finally:
            remove(self.model)
        assert total is not None
        return total

    def accuracy(self, batches: Sequence[Batch]) -> float | None:
        """Of the dense model, in percent; None without labels."""
        if not self.has_labels:
            return None
        right = sum(int(self._right(batch, self._dense_output(batch)).sum()) for batch in batches)
        return 100 * right / sum(batch.images for batch in batches)

    def times(self, ways: Sequence[Arguments], repeats: int) -> list[list[float]]:
        """Seconds of each way relative to the dense model's, all of them in turns.

        The dense model runs before, between and after a few ways at a time, so that each way is held against what the
        machine did around it: a turn of many ways lasts long, and others may come and go meanwhile.
        """
        groups = [ways[first : first + _BETWEEN_DENSE] for first in range(0, len(ways), _BETWEEN_DENSE)]
        taken = iter(self._seconds([None, *(way for group in groups for way in (*group, None))], repeats))
        before = next(taken)
        relative: list[list[float]] = []
        for group in groups:
            of_ways = [next(taken) for _ in group]
            after = next(taken)
            around = [(first + second) / 2 for first, second in zip(before, after, strict=True)]
            relative += [[spent / dense for spent, dense in zip(of_one, around, strict=True)] for of_one in of_ways]
            before = after
        return relative

    def sliced(self, counts: Sequence[int], repeats: int) -> dict[int, list[float]]:
        """Seconds of a pass, relative to dense, in which all blocks have so many patch tokens, for nothing."""
        return dict(zip(counts, self.times([self.slicing(count) for count in counts], repeats), strict=True))

    def slicing(self, count: int) -> dict[str, Any]:
        """The arguments of `apply` that leave so many patch tokens from the first block on, for nothing."""
        at = {"schedule": Counts((count,), blocks=(0,))} if count < self.tokens else {"keep_rate": 1.0}
        return {"method": Slice(), "proportional": False, **at}

    def seconds_of_dense(self) -> float:
        """Of the batch that is timed."""
        return min(self._seconds([None], 2)[0])

    def _seconds(self, ways: Sequence[Arguments | None], repeats: int) -> list[list[float]]:
        inputs = moved(self.images.timing.inputs, self.device, self.dtype)
        run = partial(self._output, self.model, inputs)

        def seconds(way: Arguments | None, _: None) -> float:
            self.apply(way)
            return seconds_per_pass(run, self.device, self._passes or 1)

        try:
            if self._passes is None:
                seconds(None, None)
                self._passes = max(1, math.ceil(_LEAST_SECONDS / seconds(None, None)))
            return seconds_in_turns([partial(seconds, way) for way in ways], [None], repeats)
        finally:
            remove(self.model)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> Any:
        return self._output(self.model, moved(batch.inputs, self.device, self.dtype))

    def _dense_output(self, batch: Batch) -> Any:
        """Computed once per batch and kept."""
        if id(batch) not in self._dense:
            self._dense[id(batch)] = named_tensors(self._run(batch))[1]
        return self._dense[id(batch)]

    @torch.inference_mode()
    def _compared(self, batch: Batch, dense: Any, reduced: Any) -> Quality:
        values = self._distance(dense, reduced).double()
        if not bool(values.isfinite().all()):
            raise ValueError("the reduced model's output is not finite")
        found = {"images": batch.images, "total": float(values.sum()), "squares": float((values**2).sum())}
        if len(values) != batch.images:
            raise ValueError(f"the objective gave {tuple(values.shape)} values for {batch.images} images: one each")
        if not self.decides:
            return Quality(**found)  # type: ignore[arg-type]
        differing = int((dense.argmax(dim=-1) != reduced.argmax(dim=-1)).sum())
        if not self.has_labels:
            return Quality(**found, differing=differing)  # type: ignore[arg-type]
        before, after = self._right(batch, dense), self._right(batch, reduced)
        lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
        return Quality(**found, differing=differing, lost=lost, gained=gained)  # type: ignore[arg-type]

    def _right(self, batch: Batch, logits: Tensor) -> Tensor:
        assert batch.labels is not None
        return logits.argmax(dim=-1) == batch.labels.to(logits.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode inside, and dense and in its own mode again afterwards."""
    if applied_modules(model):
        raise ValueError("this model is reduced already: call agglo.remove(model) first")
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        remove(model)
        model.train(was_training)
