"""The training loop, on Accelerate: one CPU, several GPUs or several machines, and after a crash from where it was.

Nothing random is carried from step to step: every step seeds its own draws (`randomness`), rates are a function of the
step (timm's schedulers), and the checkpoint holds the rest. So a run that was killed ends with the same weights.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from agglo.classification.data.batches import Batch, Share, TrainingData
from agglo.classification.evaluation.metrics import metric_for
from agglo.classification.evaluation.one_pass import evaluate
from agglo.classification.training.objective import Objective
from agglo.classification.training.optimisation import optimiser_and_rates
from agglo.classification.training.parameter_groups import freeze_backbone
from agglo.classification.training.preparation import (
    build_models,
    fresh_names,
    open_splits,
    training_data,
    validation_loader,
)
from agglo.classification.training.settings import MAY_DIFFER, TrainingSettings
from agglo.experiments.checkpoints import fingerprint
from agglo.experiments.progress import progress
from agglo.experiments.randomness import seed_everything
from agglo.experiments.run_folder import RunFolder


class NonFiniteLossError(ValueError):
    """Training went astray: the loss or its gradient is no number."""


@dataclass
class Position:
    """Where a run stands: what a checkpoint holds besides weights and moments.

    step: optimiser steps done. loss_sum: of the steps since the latest evaluation.
    rows: of the log, one an evaluation; the first may be of epoch 0, before training.
    """

    step: int = 0
    loss_sum: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def evaluated(self) -> int:
        """The latest epoch that was evaluated; -1 if none."""
        return self.rows[-1]["epoch"] if self.rows else -1

    @property
    def best_row(self) -> dict[str, Any]:
        """The first of the best rows, by the weights or their average. What was there before training is none."""
        return max((row for row in self.rows if row["epoch"] > 0), key=lambda row: row["best_metric"])


def finetune(settings: TrainingSettings, data: Path, output: Path) -> dict[str, Any]:
    """Train as the settings say, or go on where an earlier call with the same settings stopped.

    data: folder of the data set. output: folder of the run.
    Returns the best row of the log. Started by `accelerate launch` or `torchrun`, all processes call this.
    """
    from accelerate import Accelerator

    has_device = torch.accelerator.is_available()
    if settings.precision == "fp16" and not has_device:
        raise ValueError(
            "precision='fp16' needs a GPU: Accelerate would train in float32; a CPU can do 'bf16' and 'no'"
        )
    # Of the machine, so not part of what the settings say.
    automatic = "fp16" if torch.cuda.is_available() else "no"
    tracker = None if settings.tracker == "none" else settings.tracker
    accelerator = Accelerator(
        # Unless told, Accelerate takes each of several processes without a GPU for a run of its own.
        cpu=not has_device,
        mixed_precision=automatic if settings.precision == "auto" else settings.precision,
        log_with=tracker,
        project_dir=output,
    )
    _require_data_parallel(accelerator)
    folder = RunFolder(output)
    defaults = asdict(TrainingSettings(from_scratch=True))
    folder.require_same(asdict(settings), accelerator.num_processes, defaults=defaults, may_differ=MAY_DIFFER)
    splits = open_splits(settings, data)
    model, teacher = build_models(settings, splits.classes)
    start = {} if settings.from_scratch else {"weights": fingerprint(model.state_dict())}
    fresh = fresh_names(settings, model)
    if fresh and accelerator.is_main_process:
        print(f"not in {settings.checkpoint}, so started afresh: {', '.join(fresh)}", file=sys.stderr)
    share = Share(settings.batch_size, settings.accumulation, accelerator.num_processes, accelerator.process_index)
    batches = training_data(settings, splits, model, share)
    objective = Objective(settings, model, splits.classes, splits.multi_label, teacher)
    validation = accelerator.prepare_data_loader(validation_loader(settings, splits, model))
    trainer = Trainer(settings, accelerator, folder, model, objective, batches, validation, share)
    # Every process has looked into the folder before the first one writes to it.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder.start(asdict(settings), accelerator.num_processes, data, splits.skipped)
        folder.require_same_start({**start, "training images": splits.train.fingerprint()})
    if tracker is not None:
        accelerator.init_trackers("agglo", {name: str(value) for name, value in asdict(settings).items()})
    best = trainer.run()
    if accelerator.is_main_process:
        folder.finish(best)
    accelerator.end_training()
    accelerator.free_memory()
    return best


def _require_data_parallel(accelerator: Any) -> None:
    """Checkpoints and exports take the weights to be whole in every process."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(f"Accelerate is set to {kind}, which shards weights; data parallel runs are what this can do")


class Trainer:
    """One run, from its last checkpoint to its end."""

    def __init__(
        self,
        settings: TrainingSettings,
        accelerator: Any,
        folder: RunFolder,
        model: nn.Module,
        objective: Objective,
        data: TrainingData,
        validation: Any,
        share: Share,
    ) -> None:
        from timm.utils import ModelEmaV3

        self.settings, self.accelerator, self.folder = settings, accelerator, folder
        self.objective, self.data, self.validation = objective, data, validation
        self.multi_label = objective.multi_label
        self.steps_per_epoch = len(data) // share.total
        if self.steps_per_epoch == 0:
            raise ValueError(f"{len(data)} training images do not fill one step of {share.total}: lower batch_size")
        self.total_steps = settings.epochs * self.steps_per_epoch
        # The average is copied before Accelerate wraps the model's forward: a copy of that would run the original.
        self.average = (
            ModelEmaV3(model, settings.ema_decay, use_warmup=settings.ema_warmup) if settings.ema_decay else None
        )
        self.optimiser, self.scheduler = optimiser_and_rates(settings, model, share.total, self.steps_per_epoch)
        self.model = model
        self.wrapped, self.stepper = accelerator.prepare(model, self.optimiser)
        for other in (self.average, objective.teacher):
            if other is not None:
                other.to(accelerator.device)
        self.position = Position()
        self._restore()

    def run(self) -> dict[str, Any]:
        """Train to the end; the best row of the log."""
        self.saved_at = time.monotonic()
        quiet = not self.accelerator.is_main_process
        with progress(
            self.total_steps, "finetune", start=self.position.step, every_seconds=10, quiet=quiet
        ) as self.tell:
            while True:
                epoch, within = divmod(self.position.step, self.steps_per_epoch)
                if within == 0 and self._is_evaluation_due(epoch):
                    self._evaluate(epoch)
                elif self.position.step < self.total_steps:
                    self._train(epoch, within)
                else:
                    break
        return self.position.best_row

    def _is_evaluation_due(self, epoch: int) -> bool:
        """Whether, after so many epochs, an evaluation comes before the next one."""
        if epoch == 0:
            return self.settings.evaluate_first and not self.position.rows
        in_turn = epoch % self.settings.evaluate_every == 0 or epoch == self.settings.epochs
        return in_turn and self.position.evaluated < epoch

    def _train(self, epoch: int, first: int) -> None:
        """The rest of an epoch, from step `first` of it on."""
        self.wrapped.train()
        self._set_patch_drop(epoch)
        batches = self.data.batches(epoch, first, self.steps_per_epoch)
        for _ in range(first, self.steps_per_epoch):
            loss = self._step(epoch, batches)
            self.position.step += 1
            self.position.loss_sum += loss
            self.tell(f"epoch {epoch + 1}/{self.settings.epochs} loss {loss:.3f}")
            if time.monotonic() - self.saved_at >= 60 * self.settings.checkpoint_minutes:
                self._save()
        if not self._is_evaluation_due(epoch + 1):
            self._save()

    def _step(self, epoch: int, batches: Iterator[Batch]) -> float:
        """One step of the optimiser; its loss, a mean over all processes."""
        self.scheduler.step_update(self.position.step)
        if epoch < self.settings.frozen_epochs:
            freeze_backbone(self.optimiser.param_groups)
        total = torch.zeros((), device=self.accelerator.device)
        for part in range(self.settings.accumulation):
            inputs, targets = (tensor.to(self.accelerator.device, non_blocking=True) for tensor in next(batches))
            # Batches draw too where no worker processes do: seed after them.
            seed_everything(self.settings.seed, "step", self.position.step, part, self.accelerator.process_index)
            last = part == self.settings.accumulation - 1
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                with self.accelerator.autocast():
                    loss = self.objective(self.wrapped, inputs, targets) / self.settings.accumulation
                self.accelerator.backward(loss)
            total += loss.detach()
        # One process's loss that is not a number spoils everybody's gradients: all of them stop.
        mean = float(self.accelerator.reduce(total, "mean"))
        self._require_finite("loss", mean, epoch)
        self._require_finite("gradient's norm", self._clipped_norm(), epoch)
        self.stepper.step()
        self.stepper.zero_grad()
        if self.average is not None:
            self.average.update(self.model, step=self.position.step + 1 if self.settings.ema_warmup else None)
        return mean

    def _clipped_norm(self) -> float:
        """The norm of the gradient before it is clipped; 0 under a scaler, which leaves out steps that overflow."""
        if self.settings.clip_grad:
            norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.settings.clip_grad)
        else:
            norm = get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None)
        return 0.0 if self.accelerator.scaler is not None else float(norm)

    def _require_finite(self, what: str, value: float, epoch: int) -> None:
        """Stop before a step that would spoil the weights, and with them the next checkpoint."""
        if not math.isfinite(value):
            last = self.folder.last / "state.pt"
            left = (
                f"the last checkpoint, {str(last)!r}, is from before" if last.exists() else "no checkpoint was due yet"
            )
            raise NonFiniteLossError(
                f"the {what} is {value} in epoch {epoch + 1}, step {self.position.step}: training went astray; {left}; "
                "try a lower lr, clip_grad=1 or precision=no"
            )

    def _set_patch_drop(self, epoch: int) -> None:
        rates = self.settings.patch_drop_rates
        if any(rates):
            self.model.patch_drop.prob = rates[epoch] if epoch < len(rates) else 0.0  # type: ignore[union-attr]

    def _evaluate(self, epoch: int) -> None:
        """Add a row to the log, keep the weights if they are the best so far, and save where the run stands."""
        row: dict[str, Any] = {"epoch": epoch}
        if epoch:
            steps = (epoch - max(self.position.evaluated, 0)) * self.steps_per_epoch
            row |= {"train_loss": self.position.loss_sum / steps, "lr": self._rate()}
        candidates = [("", self.model)] + ([] if self.average is None else [("ema_", self.average.module)])
        for prefix, model in candidates:
            found = evaluate(model, self.validation, metric_for(self.multi_label), accelerator=self.accelerator)
            row |= {prefix + name: value for name, value in found.items() if name not in _NOT_METRICS}
        counts = "mAP" if self.multi_label else "top1"
        prefix, model = max(candidates, key=lambda candidate: row[candidate[0] + counts])
        row |= {"best_metric": row[prefix + counts]}
        self.position.rows.append(row)
        better = epoch > 0 and self.position.best_row is row
        self.position.loss_sum = 0.0
        self.accelerator.log({name: value for name, value in row.items() if name != "epoch"}, step=epoch)
        if self.accelerator.is_main_process:
            if better:
                self.folder.save_best(model.state_dict(), self._about(), {**row, "average": prefix == "ema_"})
            self.folder.save_last(self.model.state_dict(), self._about())
            self.folder.save_log(self.position.rows)
        # Last, so that a run killed before this does all of the above again.
        self._save()

    def _rate(self) -> float:
        return max(group["lr"] for group in self.optimiser.param_groups)

    def _about(self) -> dict[str, str]:
        told = {"model": self.settings.model, "dataset": self.settings.dataset, "method": self.settings.method}
        return {**told, "keep_rate": str(self.settings.keep_rate)}

    def _save(self) -> None:
        """Write where the run stands; every process does the same, one writes."""
        self.saved_at = time.monotonic()
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            self.folder.save(
                {
                    "model": self.model.state_dict(),
                    "average": None if self.average is None else self.average.module.state_dict(),
                    "optimiser": self.optimiser.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "position": asdict(self.position),
                }
            )

    def _restore(self) -> None:
        state = self.folder.load()
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.module.load_state_dict(state["average"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.position = Position(**state["position"])


_NOT_METRICS = ("images", "images_per_second")
