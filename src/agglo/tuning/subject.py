"""The model that is tuned: reduced by one config after another, compared with the dense model and timed against it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.diffusers import is_diffusion
from agglo.hosts.registry import find_tower
from agglo.models.libraries import class_count
from agglo.models.outputs import call, named_tensors
from agglo.patch import apply, remove, report, trace
from agglo.tuning.images import Batch, TuneImages, moved
from agglo.tuning.result import Quality
from agglo.tuning.settings import TuneSettings
from agglo.utils.timing import in_turns, seconds_per_pass

_LEAST_SECONDS = 0.04  # a timing shorter than this runs the model several times


class Cost(NamedTuple):
    """GFLOPs of a config, relative to dense, and the patch tokens left after each block."""

    gflops: float
    counts: list[int]


class Subject:
    """A model with the images it is tuned on; it is dense between calls.

    Attributes:
        tokens: Patch tokens of an image; those of the first one where images differ.
        depth: Number of blocks; None for a diffusion model, which takes one keep rate.
        decides: Whether outputs are logits (B, classes), so that the top class is a decision.
        objective: How outputs are compared: "kl" of logits, or their "relative" error.
    """

    def __init__(self, model: nn.Module, images: TuneImages, settings: TuneSettings) -> None:
        self.model, self.images, self.tower = model, images, settings.tower
        like = next(model.parameters())
        self.device, self.dtype = like.device, like.dtype
        self._output = settings.output or call
        self._dense: dict[int, Any] = {}
        self._costs: dict[ReductionConfig, Cost] = {}
        self._passes: int | None = None
        objective = objective_of(model, self._run(images.search[0]), has_labels=images.has_labels)
        self.objective = objective if isinstance(objective, str) else "relative"
        self.decides = self.objective == "kl"
        self.has_labels = images.has_labels and self.decides
        self.depth: int | None = None
        if is_diffusion(model):
            with self._reduced(ReductionConfig(keep_rate=1.0)):
                found = report(model, settings.n_tokens)
            assert found is not None
            self.tokens = found.n_tokens
            return
        module, host = find_tower(model, self.tower)
        layout = host.layout(module)
        self.depth = layout.depth
        if layout.depth < 2:
            raise ValueError(f"a transformer of depth {layout.depth} leaves nothing to tune")
        with self._reduced(ReductionConfig("free", schedule=[1], proportional=False)):  # type: ignore[arg-type]
            with trace(model) as record:
                self._run(images.search[0])
            if not record.passes:
                raise ValueError("output= does not run the transformer that is to be reduced")
        self.tokens = int(record.steps[0].outcome.grouping.labels.shape[1]) - layout.prefix

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

    def share(self, config: ReductionConfig) -> float:
        """Return the share of the dense model's GFLOPs that a config costs; ValueError if it cannot be applied."""
        try:
            return self.cost(config).gflops
        except UnsupportedModelError as error:
            raise ValueError(str(error)) from error

    def quality(self, config: ReductionConfig, batches: Sequence[Batch]) -> Quality:
        """Return how near outputs are to the dense model's; ValueError if they are not finite."""
        expected = [self._dense_output(batch) for batch in batches]
        with self._reduced(config):
            pairs = zip(batches, expected, strict=True)
            found = [compared(self.objective, *each, named_tensors(self._run(each[0]))[1]) for each in pairs]
        if not all(bool(values.isfinite().all()) for _, values in found):
            raise ValueError("the reduced model's output is not finite")
        return reduce(add, (quality for quality, _ in found))

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

        def seconds(config: ReductionConfig | None, turn: int = 0) -> float:
            with self._reduced(config):
                return seconds_per_pass(run, self.device, self._passes or 1)

        if self._passes is None:
            seconds(None)
            self._passes = max(1, math.ceil(_LEAST_SECONDS / seconds(None)))
        return in_turns(configs, seconds, repeats)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> Any:
        return self._output(self.model, moved(batch.inputs, self.device, self.dtype))

    def _dense_output(self, batch: Batch) -> Any:
        if id(batch) not in self._dense:
            self._dense[id(batch)] = named_tensors(self._run(batch))[1]
        return self._dense[id(batch)]


def objective_of(model: nn.Module, answer: Any, *, has_labels: bool = False) -> str | list[str]:
    """Return how outputs are compared, given one of them: by "kl" if it is logits (B, classes), else by "relative".

    Of several tensors each is compared in its own way.
    """
    name, tensors = named_tensors(answer)
    if not isinstance(tensors, Tensor):
        return ["kl" if tensor.shape[1:] == (class_count(model),) else "relative" for tensor in tensors]
    # Labels can be compared with logits alone.
    is_head = name == "logits" or (name is None and (has_labels or (class_count(model),) == tensors.shape[1:]))
    return "kl" if tensors.dim() == 2 and is_head else "relative"


@torch.no_grad()
def compared(objective: str | list[str], batch: Batch, dense: Any, reduced: Any) -> tuple[Quality, Tensor]:
    """Return how near the outputs of a batch are to the dense model's, and the distance of each image (B,)."""
    values = distances(objective, dense, reduced).double()
    differing = lost = gained = None
    if objective == "kl":
        differing = int((dense.argmax(dim=-1) != reduced.argmax(dim=-1)).sum())
        if batch.labels is not None:
            before, after = _right(batch, dense), _right(batch, reduced)
            lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
    return Quality(batch.images, float(values.sum()), float((values**2).sum()), differing, lost, gained), values


def _right(batch: Batch, logits: Tensor) -> Tensor:
    assert batch.labels is not None
    return logits.argmax(dim=-1) == batch.labels.to(logits.device)


def distances(objective: str | list[str], dense: Any, reduced: Any) -> Tensor:
    """Return the distance of each image's outputs (B,), the mean where there are several outputs.

    "kl" is the KL divergence of the softmax of logits (B, classes), "relative" is |reduced - dense| / |dense| of
    outputs (B, ...), all values of an image in one vector. A list has the objective of each output.
    """
    if not isinstance(dense, Tensor):
        objectives = [objective] * len(dense) if isinstance(objective, str) else objective
        each = [distances(*parts) for parts in zip(objectives, dense, reduced, strict=True)]
        return torch.stack(each).mean(dim=0)
    if objective == "kl":
        expected, found = (logits.float().log_softmax(dim=-1) for logits in (dense, reduced))
        return (expected.exp() * (expected - found)).sum(dim=-1)
    expected, found = (output.float().reshape(len(dense), -1) for output in (dense, reduced))
    return (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-12)
