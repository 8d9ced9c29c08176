"""Training a detector: what this task brings to the training loop that all tasks share."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from agglo.detection.data import transforms_for
from agglo.detection.evaluation.one_pass import Images, evaluate
from agglo.detection.training.parameter_groups import parameter_groups
from agglo.detection.training.preparation import build_model, open_splits, training_data
from agglo.detection.training.settings import MAY_DIFFER, DetectionSettings
from agglo.experiments.checkpoints import fingerprint
from agglo.experiments.training.batches import Share
from agglo.experiments.training.loop import TrainingTask, train
from agglo.experiments.training.optimisation import drops
from agglo.experiments.training.reduction import heard, method_loss

_LOGGED = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def train_detector(settings: DetectionSettings, data: Path, output: Path, *, cpu: bool = False) -> dict[str, Any]:
    """Train as the settings say, or go on where an earlier call with the same settings stopped.

    data: folder of the data set, or a JSON file. output: folder of the run. cpu: train on it even where there is a GPU.
    Returns the best row of the log. Started by `accelerate launch` or `torchrun`, all processes call this.
    """
    return train(
        settings,
        data,
        output,
        lambda accelerator, share: Detection(settings, data, accelerator, share),
        defaults=DetectionSettings(from_scratch=True),
        may_differ=MAY_DIFFER,
        name="detect train",
        loss_scale=settings.loss_scale,
        some_unused=True,
        cpu=cpu,
    )


class Detection(TrainingTask):
    """A detector, its augmented images and its losses."""

    rates = staticmethod(drops)

    def __init__(self, settings: DetectionSettings, data: Path, accelerator: Any, share: Share) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.splits = open_splits(settings, data)
        self._tell(self.splits.remarks)
        if all(entry["iscrowd"] for entry in self.splits.validation.ground_truth["annotations"]):
            raise ValueError(f"data={str(data)!r}: no validation image has an object, so that nothing can be judged")
        self.spec = settings.spec(self.splits.train.classes)
        self.model = self._synchronised(build_model(settings, self.splits.train.classes))
        self.start = {} if settings.from_scratch else {"weights": fingerprint(self.model.state_dict())}
        self.data = training_data(settings, self.splits, share)
        self.groups = parameter_groups(self.model, weight_decay=settings.weight_decay)
        self.ranked_by = settings.ranked_by
        _, transform = transforms_for(settings.image_size)
        self.validation = Images(
            self.splits.validation,
            transform,
            batch_size=settings.evaluation_batch_size,
            workers=settings.workers,
            accelerator=accelerator,
        )

    def _tell(self, notes: Sequence[str]) -> None:
        if self.accelerator.is_main_process:
            for note in notes:
                print(f"agglo: {note}", file=sys.stderr)

    def _synchronised(self, model: nn.Module) -> nn.Module:
        """Batch norms that see the batches of all processes, as in the released training."""
        if self.accelerator.num_processes == 1:
            return model
        if self.accelerator.device.type == "cpu":
            self._tell(["batch norms see one process's images each: torch synchronises them between GPUs only"])
            return model
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)

    def loss(self, forward: nn.Module, inputs: Any, targets: Any) -> Mapping[str, Tensor]:
        with heard(self.model) as record:
            losses = forward(inputs, targets)
        if (extra := method_loss(record)) is not None:
            losses = {**losses, "loss_method": extra}
        return {name: value.float() for name, value in losses.items()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = evaluate(model, self.validation, accelerator=self.accelerator)
        numbers = {f"{kind}_{name}": found[f"{kind}_{name}"] for kind in ("box", "mask") for name in _LOGGED}
        # Where no object has a size there is no AP of that size: the column is left out.
        return {name: value for name, value in numbers.items() if value is not None}

    def about(self) -> dict[str, str]:
        settings = self.settings
        what = {"model": settings.model, "dataset": settings.dataset, "method": settings.method}
        return {**what, "keep_rate": str(settings.keep_rate), **self.spec.about()}

    def fingerprints(self) -> dict[str, str]:
        return {**self.start, "training images": self.splits.train.fingerprint()}

    def skipped(self) -> Sequence[str]:
        return self.splits.skipped
