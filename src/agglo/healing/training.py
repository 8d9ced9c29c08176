"""The training of a healing: a step follows from its number alone, so that a resumed run does what it would have."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from agglo.healing.images import Batches, Parts, Source, chance_of
from agglo.models.checkpoints import fingerprint
from agglo.models.outputs import named_tensors
from agglo.tuning.images import Batch, moved, tensors_in
from agglo.tuning.result import Quality
from agglo.tuning.settings import Output
from agglo.tuning.subject import compared, distances, objective_of
from agglo.utils.files import load_state, save_state
from agglo.utils.journal import plain, require_same
from agglo.utils.progress import progress

_VIEWS = 4  # of each image: their dense outputs are computed once, and every further pass is cheaper
_KEPT_BYTES = 1e9  # of views and dense outputs
_PASSES = 60  # over the images at most, however many fit into the time
_JUDGED, _PATIENCE = 10, 6  # times that the stopping part is judged; times without gain that end the training
_WARMUP = 0.1  # part of the steps in which the learning rate rises
_CLIP = 1.0  # norm of the gradient
_RATES = {"norm": 1.0, "bias": 0.1, "matrix": 0.005}  # learning rates, relative to that of norms
_SAVE_SECONDS = 60.0


@dataclass
class Position:
    """Progress of a run, which a checkpoint holds besides values and moments."""

    total: int  # steps
    step: int = 0
    seconds: float = 0.0
    curve: tuple[tuple[int, float], ...] = ()
    best: Tensor | None = None  # values at the lowest point of the curve

    @property
    def lowest(self) -> int:
        """Which point of the curve is the lowest, the first of equal ones."""
        return min(range(len(self.curve)), key=lambda point: self.curve[point][1])


class Training:
    """A reduced model, its dense copy, and the parameters to train, as one float32 vector.

    Attributes:
        objective: How outputs are compared.
        values: What the trained parameters are.
    """

    def __init__(
        self,
        model: nn.Module,
        dense: nn.Module,
        kinds: Mapping[nn.Parameter, str],
        source: Source,
        *,
        output: Output,
        autocast: torch.dtype | None,
        lr: float,
        batch_size: int,
        seed: int,
    ) -> None:
        self.model, self.dense, self.parameters, self.source = model, dense, list(kinds), source
        self.output, self.autocast, self.lr, self.seed = output, autocast, lr, seed
        like = next(model.parameters())
        self.device, self.dtype = like.device, like.dtype
        is_shared = distributed.is_available() and distributed.is_initialized()
        self.processes = distributed.get_world_size() if is_shared else 1
        self.rank = distributed.get_rank() if is_shared else 0
        self.parts = Parts.of(len(source), seed)
        whole = isinstance(source, Batches)
        self.judged_at_once = 1 if whole else batch_size
        self.batch_size = min(self.processes if whole else batch_size, len(self.parts.training))
        if self.batch_size < self.processes:
            raise ValueError(f"{self.batch_size} images or batches a step are too few for {self.processes} processes")
        self.per_view = len(self.parts.training) // self.batch_size
        self.n_batches = self.per_view * (1 if whole else _VIEWS)
        self._kept: dict[Any, tuple[Batch, Any]] = {}
        self._kept_bytes = 0
        batch, answer = self._with_dense(self.parts.stopping[: self.judged_at_once], raw=True)
        self.objective = objective_of(model, answer, has_labels=batch.labels is not None)
        self.values = torch.cat([parameter.detach().float().flatten() for parameter in kinds])
        self._parts = list(zip(self.values.split([p.numel() for p in kinds]), kinds, strict=True))
        groups = [{"params": [part], "relative": _RATES[kinds[parameter]]} for part, parameter in self._parts]
        self.optimiser = torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)

    def about(self) -> dict[str, Any]:
        """Return what decides the result besides the settings: images and weights."""
        judged = tensors_in(self.source.batch(self.parts.stopping[: self.judged_at_once]).inputs)
        weights = {**self.dense.state_dict(), "trained": self.values}
        images = fingerprint({str(number): tensor for number, tensor in enumerate(judged)})
        return {"images": len(self.source), "judged": images, "weights": fingerprint(weights)}

    def run(
        self, file: Path | None, about: Mapping[str, Any], *, steps: int | None, until: float, quiet: bool
    ) -> Position:
        """Train, or go on where the file says, until it is done; the parameters have the best values then.

        Args:
            about: What a file must agree with.
            steps: How many; None is what fits into the time.
            until: When it should be over, on the monotonic clock.
        """
        about, clock = plain({**about, **self.about(), "processes": self.processes}), time.monotonic()
        state = None if file is None else load_state(file)
        if state is None:
            stopping, _ = self.judge(self.parts.stopping)
            total = steps or self._gathered([self._steps_until(until)])[0]
            at = Position(total, curve=((0, stopping.distance),), best=self.values.clone())
        else:
            require_same(Path(str(file)), state["about"], about, about)
            at = Position(**state["position"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.put(state["values"])
        self._gathered([])  # every process has looked for the file before the first one writes it
        saved, every = clock, max(1, at.total // _JUDGED)
        with progress(at.total, "healing", start=at.step, every_seconds=10, quiet=quiet or self.rank > 0) as advance:
            while at.step < at.total and len(at.curve) - at.lowest <= _PATIENCE:
                loss = self._step(at.step, at.total)
                if not math.isfinite(loss):
                    break
                at.step += 1
                judged = at.step % every == 0 or at.step == at.total
                if judged:
                    found, _ = self.judge(self.parts.stopping)
                    at.curve = (*at.curve, (at.step, found.distance if math.isfinite(found.total) else math.inf))
                    if at.curve[-1] == at.curve[at.lowest]:
                        at.best = self.values.clone()
                now = time.monotonic()
                at.seconds, clock = at.seconds + now - clock, now
                if file is not None and self.rank == 0 and (judged or now - saved > _SAVE_SECONDS):
                    saved = now
                    state = {"values": self.values, "optimiser": self.optimiser.state_dict(), "position": vars(at)}
                    save_state(file, {"about": about, **state})
                advance(f"{self.objective} {loss:.4f}, of images to stop by {at.curve[-1][1]:.4f}")
        assert at.best is not None
        self.put(at.best)
        return at

    def judge(self, indices: Sequence[int]) -> tuple[Quality, Tensor]:
        """Return how near the outputs of images are to the dense ones, and the distance of each image."""
        parts = [indices[at : at + self.judged_at_once] for at in range(0, len(indices), self.judged_at_once)]
        found = []
        for part in parts[self.rank :: self.processes]:
            batch, dense = self._with_dense(part)
            with torch.no_grad():
                quality, values = compared(self.objective, batch, dense, self._answer(self.model, batch))
            found.append((quality, values.cpu()))
        qualities, each = zip(*self._gathered(found), strict=True)
        return reduce(add, qualities), torch.cat(each)

    @torch.no_grad()
    def put(self, values: Tensor) -> None:
        """Give the parameters these values."""
        self.values.copy_(values)
        for part, parameter in self._parts:
            parameter.copy_(part.view_as(parameter))

    def _step(self, step: int, total: int) -> float:
        """Take a step of the cycle and return the loss before it; where that is not finite nothing changes."""
        order = chance_of(self.seed, "order", step // self.n_batches).sample(range(self.n_batches), self.n_batches)
        loss, gradient = self._gradient(order[step % self.n_batches])
        if not math.isfinite(loss):
            return math.inf
        done = (step + 1) / total
        rising = done / _WARMUP
        falling = (1 + math.cos(math.pi * (done - _WARMUP) / (1 - _WARMUP))) / 2
        gradient *= min(1.0, _CLIP / max(float(gradient.norm()), 1e-12))
        sizes = [len(part) for part, _ in self._parts]
        for group, part in zip(self.optimiser.param_groups, gradient.split(sizes), strict=True):
            group["params"][0].grad = part
            group["lr"] = self.lr * group["relative"] * (rising if done < _WARMUP else falling)
        self.optimiser.step()
        self.put(self.values)
        return loss

    def _gradient(self, number: int) -> tuple[float, Tensor]:
        """Return the loss of a batch by its number, and its gradient, over the shares of all processes."""
        view, position = divmod(number, self.per_view)
        images = chance_of(self.seed, "view", view).sample(self.parts.training, len(self.parts.training))
        batch_indices = images[position * self.batch_size : (position + 1) * self.batch_size]
        share = batch_indices[self.rank :: self.processes]
        batch, dense = self._with_dense(share, view)
        with torch.enable_grad():
            loss = distances(self.objective, dense, self._answer(self.model, batch)).mean()
            loss = loss * (len(share) / len(batch_indices))
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(self.parameters, found, strict=True)
        parts = [torch.zeros_like(p) if gradient is None else gradient for p, gradient in pairs]
        vector = torch.cat([loss.detach().reshape(1), *(part.flatten() for part in parts)]).float()
        if self.processes > 1:
            distributed.all_reduce(vector)
        return float(vector[0]), vector[1:]

    def _with_dense(self, indices: Sequence[int], view: int | None = None, *, raw: bool = False) -> tuple[Batch, Any]:
        """Return images, in a view or as they are, and the dense model's outputs; raw leaves these in its own type."""
        key = (view, *indices)
        if key in self._kept and not raw:
            return self._kept[key]
        batch = self.source.batch(indices, None if view is None else partial(chance_of, self.seed, view))
        with torch.no_grad():
            answer = self._run(self.dense, batch)
        found = batch, answer if raw else named_tensors(answer)[1]
        size = sum(tensor.nbytes for tensor in tensors_in((batch.inputs, found[1])))
        if not raw and self._kept_bytes + size <= _KEPT_BYTES:
            self._kept[key] = found
            self._kept_bytes += size
        return found

    def _answer(self, model: nn.Module, batch: Batch) -> Any:
        return named_tensors(self._run(model, batch))[1]

    def _run(self, model: nn.Module, batch: Batch) -> Any:
        inputs = moved(batch.inputs, self.device, self.dtype)
        normalised = moved(self.source.normalise(inputs), self.device, self.dtype)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return self.output(model, normalised)

    def _gathered(self, found: list[Any]) -> list[Any]:
        """Return what all processes found, those of the first one first."""
        if self.processes == 1:
            return found
        parts: list[Any] = [None] * self.processes
        distributed.all_gather_object(parts, found)
        return [each for part in parts for each in part]

    def _steps_until(self, until: float) -> int:
        """Return how many steps fit: with a dense pass while views are new, without one afterwards."""
        self._gradient(0)  # compiles kernels and fills caches
        before = time.monotonic()
        self._gradient(0)
        step, before = time.monotonic() - before, time.monotonic()
        self._gradient(1 % self.n_batches)
        first = max(time.monotonic() - before, step)
        # A step without its backward pass takes less than half of it.
        judging = (len(self.parts.stopping) * _JUDGED + len(self.parts.reporting) * 3) / self.batch_size * step / 2
        left = max(until - time.monotonic() - judging, 0.0)
        new = min(int(left / first), self.n_batches)
        return max(1, min(new + int((left - new * first) / step), _PASSES * self.per_view))
