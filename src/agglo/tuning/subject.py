"""The model that is tuned: reduced by one config after another, compared with the dense model, and timed beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.hosts.diffusers import is_diffusion
from agglo.hosts.registry import applied_modules, find_tower
from agglo.models.outputs import named_tensors
from agglo.patch import apply, remove, report, trace
from agglo.tuning.images import Batch, Images, moved, tensors_in
from agglo.tuning.objectives import Output, objective_for, objective_named, output_of
from agglo.tuning.settings import TuneSettings
from agglo.tuning.statistics import Quality
from agglo.utils.timing import seconds_in_turns, seconds_per_pass

_LEAST_SECONDS = 0.04  # a timing shorter than this runs the model several times


@dataclass(frozen=True)
class Cost:
    """GFLOPs of a config, relative to dense, and the patch tokens left after each block."""

    gflops: float
    counts: list[int]


class Subject:
    """A model with the images it is tuned on; it is dense between calls.

    Attributes:
        tokens: Patch tokens of an image; those of the model's own image size where images differ.
        any_size: Whether images differ in their number of tokens, so that a schedule must be of fractions.
        depth: Number of blocks; None for a diffusion model, which takes one keep rate.
        objective: Name of the objective.
        decides: Whether outputs are logits, so that the top class is a decision.
    """

    def __init__(
        self, model: nn.Module, images: Images, settings: TuneSettings, *, output: Output | None = None
    ) -> None:
        self.model, self.images, self.tower = model, images, settings.tower
        like = next(model.parameters())
        self.device, self.dtype = like.device, like.dtype
        self._output = output_of(model) if output is None else output
        self._dense: dict[int, Any] = {}
        self._costs: dict[ReductionConfig, Cost] = {}
        self._passes: int | None = None
        name, tensors = named_tensors(self._run(images.search[0]))
        objective = settings.objective
        if objective == "auto":
            objective = objective_for(model, name, tensors, images.has_labels)
        self.objective = objective if isinstance(objective, str) else getattr(objective, "__name__", "its own")
        self._distance = objective_named(objective)
        self.decides = objective == "kl" and isinstance(tensors, Tensor) and tensors.dim() == 2
        self.has_labels = images.has_labels and self.decides
        self.depth: int | None = None
        self.any_size = False
        if is_diffusion(model):
            with self._reduced(ReductionConfig(keep_rate=1.0)):
                found = report(model, settings.n_tokens)
            assert found is not None
            self.tokens = found.n_tokens
        else:
            self._count_tokens(settings.n_tokens)

    def _count_tokens(self, n_tokens: int | None) -> None:
        """Find out how many tokens images have, from passes that remove one token."""
        module, host = find_tower(self.model, self.tower)
        layout = host.layout(module)
        self.depth = layout.depth
        if layout.depth < 2:
            raise ValueError(f"a transformer of depth {layout.depth} leaves nothing to tune")
        batches = (*self.images.search, *self.images.confirmation)
        of_each_shape = {str([tensor.shape[-3:] for tensor in tensors_in(b.inputs)]): b for b in batches}
        seen = set()
        with self._reduced(ReductionConfig("free", schedule=[1], proportional=False)):  # type: ignore[arg-type]
            try:
                for batch in of_each_shape.values():
                    with trace(self.model) as record:
                        self._run(batch)
                    seen.add(int(record.steps[0].outcome.grouping.labels.shape[1]) - layout.prefix)
                    if len(seen) > 1:
                        break
            except RuntimeError as error:
                if "nothing was traced" in str(error):
                    raise ValueError("output= does not run the transformer that is to be reduced") from None
                raise
        self.any_size = len(seen) > 1
        self.tokens = n_tokens or (layout.patches if self.any_size else seen.pop())

    @contextmanager
    def _reduced(self, config: ReductionConfig | None) -> Iterator[None]:
        """Reduce the model within a block; None leaves it dense."""
        try:
            if config is not None:
                apply(self.model, config, tower=self.tower)
            yield
        finally:
            remove(self.model)

    def require_runs(self, config: ReductionConfig) -> None:
        """Raise a ValueError where the model refuses a config; some do so only when they run."""
        with self._reduced(config):
            self._run(self.images.search[0])

    def cost(self, config: ReductionConfig) -> Cost:
        """Return what a config costs, without running it; a ValueError says that it cannot be applied."""
        if config not in self._costs:
            with self._reduced(config):
                found = report(self.model, self.tokens)
            assert found is not None and found.counts is not None and found.gflops_after is not None
            self._costs[config] = Cost(found.gflops_after / found.gflops_before, found.counts)
        return self._costs[config]

    def quality(self, config: ReductionConfig, batches: Sequence[Batch]) -> Quality:
        """Return how near outputs are to the dense model's; ValueError if they are not finite."""
        expected = [self._dense_output(batch) for batch in batches]
        with self._reduced(config):
            first, *further = (
                self._compared(batch, dense, named_tensors(self._run(batch))[1])
                for batch, dense in zip(batches, expected, strict=True)
            )
        return sum(further, start=first)

    def accuracy(self, batches: Sequence[Batch]) -> float | None:
        """Return the accuracy of the dense model, in percent; None without labels."""
        if not self.has_labels:
            return None
        right = sum(int(_right(batch, self._dense_output(batch)).sum()) for batch in batches)
        return 100 * right / sum(batch.images for batch in batches)

    def times(self, configs: Sequence[ReductionConfig], repeats: int) -> list[list[float]]:
        """Return the times of each config relative to the dense model's of the same turn."""
        dense, *taken = self._seconds([None, *configs], repeats)
        return [[own / other for own, other in zip(of_one, dense, strict=True)] for of_one in taken]

    def seconds_of_dense(self) -> float:
        """Return the seconds that the dense model takes for the batch that is timed."""
        return min(self._seconds([None], 2)[0])

    def _seconds(self, configs: Sequence[ReductionConfig | None], repeats: int) -> list[list[float]]:
        inputs = moved(self.images.timing.inputs, self.device, self.dtype)
        run = partial(self._output, self.model, inputs)

        def seconds(config: ReductionConfig | None) -> float:
            with self._reduced(config):
                return seconds_per_pass(run, self.device, self._passes or 1)

        if self._passes is None:
            seconds(None)
            self._passes = max(1, math.ceil(_LEAST_SECONDS / seconds(None)))
        return seconds_in_turns([partial(seconds, config) for config in configs], repeats)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> Any:
        return self._output(self.model, moved(batch.inputs, self.device, self.dtype))

    def _dense_output(self, batch: Batch) -> Any:
        if id(batch) not in self._dense:
            self._dense[id(batch)] = named_tensors(self._run(batch))[1]
        return self._dense[id(batch)]

    @torch.inference_mode()
    def _compared(self, batch: Batch, dense: Any, reduced: Any) -> Quality:
        values = self._distance(dense, reduced).double()
        if not bool(values.isfinite().all()):
            raise ValueError("the reduced model's output is not finite")
        if len(values) != batch.images:
            raise ValueError(f"the objective gave {tuple(values.shape)} values for {batch.images} images: one each")
        differing = lost = gained = None
        if self.decides:
            differing = int((dense.argmax(dim=-1) != reduced.argmax(dim=-1)).sum())
        if self.has_labels:
            before, after = _right(batch, dense), _right(batch, reduced)
            lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
        return Quality(batch.images, float(values.sum()), float((values**2).sum()), differing, lost, gained)


def _right(batch: Batch, logits: Tensor) -> Tensor:
    assert batch.labels is not None
    return logits.argmax(dim=-1) == batch.labels.to(logits.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode; afterwards it is dense and in its own mode again."""
    if applied_modules(model):
        raise ValueError("this model is reduced already: call agglo.remove(model) first")
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        remove(model)
        model.train(was_training)
