"""The training loop of every task, on Accelerate: one CPU, several GPUs or machines; a killed run can be resumed.

No random state is carried from step to step: every step seeds its own draws (`randomness`), learning rates are a
function of the step, and the checkpoint holds the rest. So a run that was killed ends with the same weights.
"""

from __future__ import annotations

import csv
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.lab.training.batches import Batch, Share, TrainingData
from agglo.lab.training.settings import LoopSettings, optimiser_and_schedule
from agglo.utils.devices import new_accelerator
from agglo.utils.files import load_state, remove_unfinished, replacing, save_state, save_weights, write_json
from agglo.utils.journal import require_same
from agglo.utils.machine import machine
from agglo.utils.progress import progress
from agglo.utils.randomness import seed_everything

BEST = "best_metric"  # in a row of the log: the metric it is ranked by, of the weights or their average


class TrainingTask(ABC):
    """The part of training that differs between tasks."""

    model: nn.Module
    data: TrainingData
    groups: Sequence[Mapping[str, Any]]  # of parameters, as `optimiser_and_schedule` takes them
    ranked_by: str  # the metric of an evaluation that says which weights are best
    lower_is_better: bool = False

    @abstractmethod
    def loss(self, forward: nn.Module, inputs: Any, targets: Any) -> Tensor | Mapping[str, Tensor]:
        """Return the loss of a batch, or its parts by name, which are added up and get a column of the log each.

        `forward` is the model, perhaps wrapped by Accelerate.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics of a model; every process returns those of all data."""

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 most have nothing to do
        """Called before the training steps of an epoch, also when it is resumed."""

    def begin_step(self, epoch: int, groups: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Called before each step, with the optimiser's groups, whose learning rates are set."""

    def about(self) -> dict[str, str]:
        """Return the metadata of the files of weights."""
        return {}

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints of what the run starts from, by name: another start in the same folder is refused."""
        return {}


def train(
    settings: LoopSettings,
    data: Path,
    output: Path,
    prepare: Callable[[Any, Share], TrainingTask],
    *,
    may_differ: Collection[str],
    name: str,
    loss_scale: float = 65536.0,
    some_unused: bool = False,
    cpu: bool = False,
) -> dict[str, Any]:
    """Train, or resume where an earlier call with the same settings stopped; return the best row of the log.

    Started by `accelerate launch` or `torchrun`, all processes call this. The folder of the run holds settings.json,
    start.json, log.csv, last/ (state.pt, model.safetensors), best/ (model.safetensors, result.json), and result.json
    once the run is done.

    Args:
        data: Folder of the data set, which settings.json notes.
        prepare: Makes the task, given the accelerator and this process's share of a batch.
        may_differ: Names of settings that decide nothing about the weights.
        loss_scale: The scale that fp16 starts with; torch's default.
        some_unused: DDP's find_unused_parameters.
        cpu: Train on the CPU even where there is a GPU.
    """
    accelerator = _accelerator(settings, output, loss_scale, some_unused, cpu)
    about = {"settings": asdict(settings), "processes": accelerator.num_processes, "data": str(data)}
    if (path := output / "settings.json").exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            then = {**before["settings"], "processes": before["processes"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is not the settings of a run; choose another folder") from error
        now = {**about["settings"], "processes": about["processes"]}
        require_same(path, then, now, [name for name in now if name not in may_differ])
    share = Share(settings.batch_size, settings.accumulation, accelerator.num_processes, accelerator.process_index)
    task = prepare(accelerator, share)
    loop = TrainingLoop(settings, accelerator, output, task, share)
    # Every process has looked into the folder before the first one writes to it.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # Settings and data are known to be right by now: a run that never began must not block the folder.
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output)
        if not path.exists():
            write_json(path, {**about, "machine": machine()})
        start = task.fingerprints()
        if not (output / "start.json").exists():
            write_json(output / "start.json", start)
        require_same(output / "start.json", started_from(output), start, start)
    if settings.tracker != "none":
        accelerator.init_trackers("agglo", {key: str(value) for key, value in about["settings"].items()})
    best = loop.run(name)
    if accelerator.is_main_process:
        write_json(output / "result.json", best)  # which marks the run as done
    for tracker in accelerator.trackers:
        tracker.finish()
    # Not `end_training`: that ends the process group too, which the next run of this process needs.
    accelerator.free_memory()
    return best


def _accelerator(settings: LoopSettings, output: Path, loss_scale: float, some_unused: bool, cpu: bool) -> Any:
    from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs

    has_device = torch.accelerator.is_available() and not cpu
    if settings.precision == "fp16" and not has_device:
        raise ValueError("precision='fp16' needs a GPU; a CPU can do 'bf16' and 'no'")
    # "auto" depends on the machine, so it is resolved here and not in the settings.
    automatic = "fp16" if has_device and torch.cuda.is_available() else "no"
    accelerator = new_accelerator(
        # By default Accelerate takes each of several processes without a GPU for a separate run.
        cpu=not has_device,
        mixed_precision=automatic if settings.precision == "auto" else settings.precision,
        log_with=None if settings.tracker == "none" else settings.tracker,
        project_dir=output,
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=some_unused),
            GradScalerKwargs(init_scale=loss_scale),
        ],
    )
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        # Checkpoints and exports need all weights in every process.
        raise ValueError(f"Accelerate is set to {kind}, which shards weights; only data parallel runs are supported")
    return accelerator


def started_from(output: Path) -> dict[str, str]:
    """Return the fingerprints of what the run in a folder started from."""
    found: dict[str, str] = json.loads((output / "start.json").read_text(encoding="utf-8"))
    return found


@dataclass
class Position:
    """Progress of a run, which a checkpoint holds besides weights and moments."""

    step: int = 0  # optimiser steps done
    sums: dict[str, float] = field(default_factory=dict)  # of the losses since the latest evaluation
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the log, one per evaluation

    @property
    def evaluated(self) -> int:
        """Latest epoch that was evaluated; -1 if none."""
        return self.rows[-1]["epoch"] if self.rows else -1


class TrainingLoop:
    """One run, from its last checkpoint to its end."""

    def __init__(
        self, settings: LoopSettings, accelerator: Any, folder: Path, task: TrainingTask, share: Share
    ) -> None:
        from timm.utils import ModelEmaV3

        self.settings, self.accelerator, self.folder, self.task = settings, accelerator, folder, task
        n_images = len(task.data)
        self.steps_per_epoch = steps = n_images // share.total
        if steps == 0:
            raise ValueError(f"{n_images} training images do not fill one step of {share.total}: lower batch_size")
        self.model = model = task.model
        # The average is copied before Accelerate wraps the model's forward: a copy of that would run the original.
        self.average = (
            ModelEmaV3(model, settings.ema_decay, use_warmup=settings.ema_warmup) if settings.ema_decay else None
        )
        self.optimiser, self.scheduler = optimiser_and_schedule(settings, task.groups, share.total, steps)
        self.wrapped, self.stepper = accelerator.prepare(model, self.optimiser)
        if self.average is not None:
            self.average.to(accelerator.device)
        self.parts = {"model": self.model, "optimiser": self.optimiser, "scaler": accelerator.scaler}
        self.parts["average"] = None if self.average is None else self.average.module
        self.position = Position()
        self.state = folder / "last" / "state.pt"
        if (state := load_state(self.state)) is not None:
            for name, part in self.parts.items():
                if part is not None and state[name] is not None:
                    part.load_state_dict(state[name])
            self.position = Position(**state["position"])

    def run(self, name: str) -> dict[str, Any]:
        """Train to the end; return the best row of the log."""
        self.saved_at = time.monotonic()
        total, quiet = self.settings.epochs * self.steps_per_epoch, not self.accelerator.is_main_process
        with progress(total, name, start=self.position.step, every_seconds=10, quiet=quiet) as advance:
            while True:
                epoch, first_step = divmod(self.position.step, self.steps_per_epoch)
                if first_step == 0 and self._is_evaluation_due(epoch):
                    self._evaluate(epoch)
                elif self.position.step < total:
                    self._train(epoch, first_step, advance)
                else:
                    return self._best_row()

    def _is_evaluation_due(self, epoch: int) -> bool:
        if epoch == 0:
            return self.settings.evaluate_first and not self.position.rows
        in_turn = epoch % self.settings.evaluate_every == 0 or epoch == self.settings.epochs
        return in_turn and self.position.evaluated < epoch

    def _best_row(self) -> dict[str, Any]:
        """Return the first of the best rows after training began."""
        choose = min if self.task.lower_is_better else max
        return choose((row for row in self.position.rows if row["epoch"] > 0), key=lambda row: row[BEST])

    def _train(self, epoch: int, first_step: int, advance: Callable[[str], None]) -> None:
        """Train the rest of an epoch."""
        self.wrapped.train()
        self.task.begin_epoch(epoch)
        batches = self.task.data.batches(epoch, first_step, self.steps_per_epoch)
        for _ in range(first_step, self.steps_per_epoch):
            losses = self._step(epoch, batches)
            self.position.step += 1
            for name, value in losses.items():
                self.position.sums[name] = self.position.sums.get(name, 0.0) + value
            advance(f"epoch {epoch + 1}/{self.settings.epochs} loss {losses['loss']:.3f}")
            if time.monotonic() - self.saved_at >= 60 * self.settings.checkpoint_minutes:
                self._save()
        if not self._is_evaluation_due(epoch + 1):
            self._save()

    def _step(self, epoch: int, batches: Iterator[Batch]) -> dict[str, float]:
        """Take one optimiser step; return its loss and the loss's parts, means over all processes."""
        from accelerate.utils import send_to_device

        self.scheduler.step_update(self.position.step)
        self.task.begin_step(epoch, self.optimiser.param_groups)
        accumulation = self.settings.accumulation
        sums: dict[str, Tensor] = {}
        for part in range(accumulation):
            inputs, targets = send_to_device(next(batches), self.accelerator.device, non_blocking=True)
            # Batches draw too where no worker processes do: seed after them.
            seed_everything(self.settings.seed, "step", self.position.step, part, self.accelerator.process_index)
            with nullcontext() if part == accumulation - 1 else self.accelerator.no_sync(self.wrapped):
                with self.accelerator.autocast():
                    found = self.task.loss(self.wrapped, inputs, targets)
                    parts = {"loss": found} if isinstance(found, Tensor) else found
                    loss = torch.stack(list(parts.values())).sum()
                self.accelerator.backward(loss / accumulation)
            for name, value in {"loss": loss, **parts}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float() / accumulation
        # A non-finite loss of one process spoils the gradients of all: all of them stop.
        means = self.accelerator.reduce(torch.stack(list(sums.values())), "mean").tolist()
        self._require_finite("loss", means[0], epoch)
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.settings.clip_grad or math.inf)
        if self.accelerator.scaler is None:  # which skips steps that overflow
            self._require_finite("gradient's norm", float(norm), epoch)
        self.stepper.step()
        self.stepper.zero_grad()
        if self.average is not None:
            self.average.update(self.model, step=self.position.step + 1 if self.settings.ema_warmup else None)
        return dict(zip(sums, means, strict=True))

    def _require_finite(self, what: str, value: float, epoch: int) -> None:
        """Raise before a step that would spoil the weights, and with them the next checkpoint."""
        if not math.isfinite(value):
            raise ValueError(
                f"the {what} is {value} in epoch {epoch + 1}, step {self.position.step}; checkpoints in "
                f"{str(self.folder / 'last')!r} are from before; try a lower lr, clip_grad=1 or precision=no"
            )

    def _evaluate(self, epoch: int) -> None:
        """Add a row to the log, keep the weights if they are the best so far, and write a checkpoint."""
        from accelerate.utils import broadcast

        row: dict[str, Any] = {"epoch": epoch}
        if epoch:
            steps = (epoch - max(self.position.evaluated, 0)) * self.steps_per_epoch
            row |= {f"train_{name}": value / steps for name, value in self.position.sums.items()}
            row["lr"] = max(group["lr"] for group in self.optimiser.param_groups)
        candidates = [("", self.model)] + ([] if self.average is None else [("ema_", self.average.module)])
        for prefix, model in candidates:
            for buffer in model.buffers():  # batch norms saw other images in each process: those of the first are saved
                broadcast(buffer)
            row |= {prefix + name: value for name, value in self.task.evaluate(model).items()}
        choose = min if self.task.lower_is_better else max
        prefix, model = choose(candidates, key=lambda candidate: row[candidate[0] + self.task.ranked_by])
        row[BEST] = row[prefix + self.task.ranked_by]
        self.position.rows.append(row)
        self.position.sums = {}
        self.accelerator.log({name: value for name, value in row.items() if name != "epoch"}, step=epoch)
        if self.accelerator.is_main_process:
            about = self.task.about()
            if epoch > 0 and self._best_row() is row:
                save_weights(self.folder / "best" / "model.safetensors", model.state_dict(), about)
                write_json(self.folder / "best" / "result.json", {**row, "average": prefix == "ema_"})
            save_weights(self.folder / "last" / "model.safetensors", self.model.state_dict(), about)
            # All rows anew: a resumed run repeats none and loses none.
            rows = self.position.rows
            with replacing(self.folder / "log.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for each in rows for name in each)))
                writer.writeheader()
                writer.writerows(rows)
        # Last, so that a run killed before this does all of the above again.
        self._save()

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if self.accelerator.is_main_process:
            state = {name: None if part is None else part.state_dict() for name, part in self.parts.items()}
            save_state(self.state, {**state, "position": asdict(self.position)})
