"""Training of a detector: what this task adds to the training loop that all tasks share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from agglo.lab.tasks.detection.data import DetectionData, collate, make_scenes, open_coco, transforms_for
from agglo.lab.tasks.detection.evaluation.average_precision import KINDS, NUMBERS, DetectionBatches, evaluate
from agglo.lab.tasks.detection.specs import method_weights
from agglo.lab.tasks.detection.training.settings import MAY_DIFFER, DetectionSettings
from agglo.lab.training.batches import ImageBatches, Share
from agglo.lab.training.loop import TrainingTask, train
from agglo.lab.training.settings import trace_if_reduced
from agglo.models.checkpoints import fingerprint, load_method
from agglo.patch import apply
from agglo.utils.randomness import seed_everything

_NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)
_EMBEDDINGS = ("pos_embed", "level_embedding")


def train_detector(settings: DetectionSettings, data: Path, output: Path, *, cpu: bool = False) -> dict[str, Any]:
    """Train a detector, or resume where an earlier call with the same settings stopped; return the log's best row.

    Started by `accelerate launch` or `torchrun`, all processes call this. cpu: Train there even if there is a GPU.
    """
    return train(
        settings,
        data,
        output,
        lambda accelerator, share: Detection(settings, data, accelerator, share),
        may_differ=MAY_DIFFER,
        name="detect train",
        loss_scale=settings.loss_scale,
        some_unused=True,
        cpu=cpu,
    )


class Detection(TrainingTask):
    """A detector, its augmented images and its losses."""

    def __init__(self, settings: DetectionSettings, data: Path, accelerator: Any, share: Share) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.train_data, validation = open_splits(settings, data)
        if all(entry["iscrowd"] for entry in validation.ground_truth["annotations"]):
            raise ValueError(f"data={str(data)!r}: no validation image has an object, so that nothing can be judged")
        self.spec = settings.spec(self.train_data.classes)
        seed_everything(settings.seed, "model")
        weights = None if settings.checkpoint is None else Path(settings.checkpoint)
        self.model: nn.Module = self.spec.build(weights, start=True)
        if settings.config is not None:
            apply(self.model, settings.config)
            if weights is not None and (learned := method_weights(weights)):
                load_method(self.model, learned, f"checkpoint={settings.checkpoint!r}")
        if accelerator.num_processes > 1 and accelerator.device.type != "cpu":  # torch synchronises between GPUs only
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.start = {} if settings.from_scratch else {"weights": fingerprint(self.model.state_dict())}
        training, evaluation = transforms_for(settings.image_size, flip=settings.flip)
        how: dict[str, Any] = {"seed": settings.seed, "workers": settings.workers, "collate": collate}
        self.data = ImageBatches(self.train_data.prepared(training), share, **how)
        self.groups = parameter_groups(self.model, weight_decay=settings.weight_decay)
        self.ranked_by = settings.ranked_by
        how = {"batch_size": settings.evaluation_batch_size, "workers": settings.workers, "accelerator": accelerator}
        self.validation = DetectionBatches(validation, evaluation, **how)

    def loss(self, forward: nn.Module, inputs: Any, targets: Any) -> Mapping[str, Tensor]:
        with trace_if_reduced(self.model) as record:
            losses = forward(inputs, targets)
        if record is not None and record.loss is not None:
            losses = {**losses, "loss_method": record.loss}
        return {name: value.float() for name, value in losses.items()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = evaluate(model, self.validation, accelerator=self.accelerator)
        numbers = {f"{kind}_{name}": found[f"{kind}_{name}"] for kind in KINDS.values() for name in NUMBERS[:6]}
        # Where no object has a size there is no AP of that size: the column is left out.
        return {name: value for name, value in numbers.items() if value is not None}

    def about(self) -> dict[str, str]:
        settings = self.settings
        what = {"model": settings.model, "dataset": settings.dataset, "method": settings.method}
        return {**what, "keep_rate": str(settings.keep_rate), **self.spec.about()}

    def fingerprints(self) -> dict[str, str]:
        return {**self.start, "training images": self.train_data.fingerprint()}


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups for AdamW, each with the `names` of its parameters: with weight decay, and without.

    Position and level embeddings, everything called bias and the scales of norms do not decay. The released rule looks
    at names, and there the norms of the convolutional prior are called "stem.1.weight", not norm: these, and the
    injectors' gamma, do decay.
    """
    modules = dict(model.named_modules())
    groups: list[dict[str, Any]] = [{"weight_decay": decay, "params": [], "names": []} for decay in (weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        norm = isinstance(modules[owner], _NORMS) and "prior." not in name
        group = groups[norm or "bias" in last or last in _EMBEDDINGS]
        group["params"].append(parameter)
        group["names"].append(name)
    return groups


def open_splits(settings: DetectionSettings, root: Path) -> tuple[DetectionData, DetectionData]:
    """Open the training and the validation data. Images without objects are not trained on, but are evaluated."""
    if settings.dataset == "scenes":
        side = settings.image_size or 112
        return (
            make_scenes(root, settings.images or settings.scenes, settings.seed, "train", side),
            make_scenes(root, settings.images or settings.validation_scenes, 0, "val", side),
        )
    train: Any = open_coco(root, "train", with_objects=True)
    if settings.held_out:
        share = settings.held_out
        held = [i for i in range(len(train)) if math.floor((i + 1) * share) > math.floor(i * share)]
        if not held:
            raise ValueError(f"held_out={share:g} of {len(train)} images is not one image")
        train, validation = train.part(sorted(set(range(len(train))) - set(held))), train.part(held)
    else:  # to overfit some images, the very ones that are learned judge
        validation = train if settings.images is not None else open_coco(root, "val")
    if train.classes != validation.classes:
        one_sided = sorted(set(train.classes) ^ set(validation.classes)) or ["the order of the classes"]
        raise ValueError(f"the splits of data={str(root)!r} differ in their classes: {', '.join(one_sided[:5])}")
    return train.spread(settings.images), validation.spread(settings.images)
