"""Fine-tuning a classifier: what this task brings to the training loop that all tasks share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from agglo.classification.evaluation.metrics import metric_for
from agglo.classification.evaluation.one_pass import evaluate
from agglo.classification.training.objective import Objective
from agglo.classification.training.parameter_groups import freeze_backbone, parameter_groups
from agglo.classification.training.preparation import (
    build_models,
    open_splits,
    starting_weights,
    training_data,
    validation_loader,
)
from agglo.classification.training.settings import MAY_DIFFER, TrainingSettings
from agglo.experiments.checkpoints import fingerprint, split_method
from agglo.experiments.training.batches import Share
from agglo.experiments.training.loop import TrainingTask, train

_NOT_METRICS = ("images", "images_per_second")


def finetune(
    settings: TrainingSettings, data: Path, output: Path, model: nn.Module | None = None, *, cpu: bool = False
) -> dict[str, Any]:
    """Train as the settings say, or go on where an earlier call with the same settings stopped.

    data: folder of the data set. output: folder of the run. model: trained in place of what settings name.
    cpu: train on it even where there is a GPU.
    Returns the best row of the log. Started by `accelerate launch` or `torchrun`, all processes call this.
    """
    return train(
        settings,
        data,
        output,
        lambda accelerator, share: Classification(settings, data, accelerator, share, model),
        defaults=TrainingSettings(from_scratch=True),
        may_differ=MAY_DIFFER,
        name="finetune",
        cpu=cpu,
    )


class Classification(TrainingTask):
    """A classifier, its augmented images and its loss."""

    def __init__(
        self,
        settings: TrainingSettings,
        data: Path,
        accelerator: Any,
        share: Share,
        given: nn.Module | None = None,
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.splits = open_splits(settings, data)
        checkpoint = starting_weights(settings)
        self.model, teacher = build_models(settings, self.splits.classes, checkpoint, given)
        self.companions = () if teacher is None else (teacher,)
        self.start = {} if settings.from_scratch else _fingerprints(self.model)
        fresh = [] if checkpoint is None else checkpoint.fresh_names(self.model)
        if fresh and accelerator.is_main_process:
            print(f"not in {settings.checkpoint}, so started afresh: {', '.join(fresh)}", file=sys.stderr)
        self.data = training_data(settings, self.splits, self.model, share)
        self.objective = Objective(settings, self.model, self.splits.classes, self.splits.multi_label, teacher)
        self.validation = accelerator.prepare_data_loader(validation_loader(settings, self.splits, self.model))
        self.groups = parameter_groups(
            self.model,
            weight_decay=settings.weight_decay,
            layer_decay=settings.layer_decay,
            backbone_lr_scale=settings.backbone_lr_scale,
        )
        self.ranked_by = "mAP" if self.splits.multi_label else "top1"

    def loss(self, forward: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.objective(forward, inputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        metric = metric_for(self.splits.multi_label)
        found = evaluate(model, self.validation, metric, accelerator=self.accelerator)
        return {name: value for name, value in found.items() if name not in _NOT_METRICS}

    def begin_epoch(self, epoch: int) -> None:
        rates = self.settings.patch_drop_rates
        if any(rates):
            self.model.patch_drop.prob = rates[epoch] if epoch < len(rates) else 0.0  # type: ignore[union-attr]

    def begin_step(self, epoch: int, groups: Sequence[dict[str, Any]]) -> None:
        if epoch < self.settings.frozen_epochs:
            freeze_backbone(groups)

    def about(self) -> dict[str, str]:
        settings = self.settings
        what = {"model": settings.model, "dataset": settings.dataset, "method": settings.method}
        return {**what, "keep_rate": str(settings.keep_rate)}

    def fingerprints(self) -> dict[str, str]:
        return {**self.start, "training images": self.splits.train.fingerprint()}

    def skipped(self) -> Sequence[str]:
        return self.splits.skipped


def _fingerprints(model: nn.Module) -> dict[str, str]:
    """Of the weights a run starts from; those of a method apart, since other methods start from the same model."""
    own, learned = split_method(model.state_dict())
    return {"weights": fingerprint(own), **({"weights of the method": fingerprint(learned)} if learned else {})}
