"""Fine-tuning of a classifier: its model and data from the settings, trained by the loop that all tasks share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from agglo.hosts.registry import applied_modules
from agglo.lab.tasks.classification.data import ClassificationData, open_split
from agglo.lab.tasks.classification.data.transforms import (
    STUDY,
    Inputs,
    evaluation_transform,
    inputs_for,
    train_transform,
)
from agglo.lab.tasks.classification.evaluation.grid import evaluate
from agglo.lab.tasks.classification.training.settings import MAY_DIFFER, TrainingSettings
from agglo.lab.training.batches import ImageBatches, MemoryBatches, Share
from agglo.lab.training.loop import TrainingTask, train
from agglo.lab.training.settings import trace_if_reduced
from agglo.methods.dynamic_vit import distillation_loss
from agglo.models.checkpoints import Checkpoint, fingerprint, load_method, split_method
from agglo.models.libraries.base import class_count, head_name, known_of, set_classes
from agglo.models.opening import ModelSpec, build
from agglo.models.outputs import logits_in
from agglo.patch import apply
from agglo.utils.randomness import seed_everything

_METHOD = "agglo_method"
# Names of the parts, at any depth of a parameter's name, in timm, transformers, torchvision and open_clip.
_POSITIONS = {"pos_embed", "position_embeddings", "position_embedding", "pos_embedding", "positional_embedding"}
_TOKENS = {"cls_token", "class_token", "class_embedding", "distillation_token", "register_tokens"}
_PATCHES = {"patch_embed", "patch_embeddings", "patch_embedding", "conv_proj", "conv1"}
_HEADS = {"head", "head_dist", "heads", "classifier", "cls_classifier", "distillation_classifier"}
# Modules that are no part of the backbone, such as in "blocks.agglo_method.mixers.0.queries".
_NEW = _POSITIONS | _PATCHES | _HEADS | {_METHOD}

Group = dict[str, Any]


def finetune(
    settings: TrainingSettings, data: Path, output: Path, model: nn.Module | None = None, *, cpu: bool = False
) -> dict[str, Any]:
    """Train on a folder of data, in the folder of a run, or continue there; see `train`.

    A `model` is trained instead of the one that settings name.
    """
    prepare = partial(Classification, settings, data, given=model)
    return train(settings, data, output, prepare, may_differ=MAY_DIFFER, name="finetune", cpu=cpu)


class Objective:
    """The loss of one batch, a mean over its images.

    The reduction of the bare model is traced, and its last norm is hooked where there is a teacher: a dense model for
    distillation, for methods that report a policy.
    """

    def __init__(
        self, settings: TrainingSettings, model: Any, classes: int, multi_label: bool, teacher: Any = None
    ) -> None:
        from timm.data import Mixup
        from timm.loss import AsymmetricLossMultiLabel, SoftTargetCrossEntropy

        mixup, cutmix, smoothing = settings.mixup, settings.cutmix, settings.label_smoothing
        if multi_label and (mixup or cutmix):
            raise ValueError(
                f"{mixup=:g} and {cutmix=:g} mix single labels; for data with several labels per image both must be 0"
            )
        if (mixup or cutmix) and settings.batch_size % 2:
            raise ValueError(f"batch_size={settings.batch_size} must be even with mixup or cutmix")
        if teacher is not None and not isinstance(getattr(model, "norm", None), nn.Module):
            raise ValueError(f"distill=true needs a model whose last norm is called `norm`, not {type(model).__name__}")
        self.model, self.teacher = model, teacher
        self.mixup: Any = None
        self.criterion: Any = nn.CrossEntropyLoss(label_smoothing=smoothing)
        if multi_label:
            asymmetric = AsymmetricLossMultiLabel(gamma_neg=4, gamma_pos=0, clip=0.05, eps=1e-8)
            # The paper sums over images; AdamW does not see the difference, but accumulation and processes would.
            self.criterion = lambda logits, targets: asymmetric(logits, targets) / len(logits)
        elif mixup or cutmix:
            self.criterion = SoftTargetCrossEntropy()
            self.mixup = Mixup(mixup, cutmix, label_smoothing=smoothing, num_classes=classes)

    def __call__(self, forward: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of forward(inputs), where `forward` is the model, perhaps wrapped by Accelerate."""
        if self.mixup is not None:
            inputs, targets = self.mixup(inputs, targets)
        tokens: list[Tensor] = []  # (B, T, C) after the last norm
        watched = nullcontext()
        if self.teacher is not None:
            watched = self.model.norm.register_forward_hook(lambda _module, _inputs, output: tokens.append(output))
        with trace_if_reduced(self.model) as record, watched:
            logits = logits_in(forward(inputs)).float()
        loss: Tensor = self.criterion(logits, targets)
        if record is not None and record.loss is not None:
            loss = loss + record.loss.float()
        if self.teacher is not None and record is not None:
            policy = record.steps[-1].outcome.policy
            if policy is None:
                raise ValueError("distill=true goes with methods that mask tokens in training (dynamicvit)")
            with torch.no_grad():
                taught = self.teacher.forward_features(inputs)
                answers = self.teacher.forward_head(taught)
            patches = (part[:, self.model.num_prefix_tokens :] for part in (tokens[0], taught, policy))
            loss = loss + distillation_loss(logits, answers, *patches)
        return loss


class Classification(TrainingTask):
    """The training task of a classifier: its augmented images and its loss."""

    def __init__(
        self, settings: TrainingSettings, data: Path, accelerator: Any, share: Share, given: nn.Module | None = None
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.train, validation = open_splits(settings, data)
        classes, multi_label = len(self.train.classes), self.train.multi_label
        checkpoint = None if settings.checkpoint is None else Checkpoint.read(Path(settings.checkpoint))
        self.model, teacher = build_models(settings, classes, checkpoint, given)
        # The method's weights apart: other methods start from the same model.
        parts = zip(("weights", "weights of the method"), split_method(self.model.state_dict()), strict=True)
        self.start = {} if settings.from_scratch else {name: fingerprint(part) for name, part in parts if part}
        fresh = [] if checkpoint is None else checkpoint.fresh_names(self.model)
        if fresh and accelerator.is_main_process:
            print(f"not in {settings.checkpoint}, so started afresh: {', '.join(fresh)}", file=sys.stderr)
        inputs = inputs_for(self.model, settings.dataset, STUDY)  # of sizes and colours: crops are random here
        seed, repeats = settings.seed, settings.repeated_augmentation if share.processes > 1 else 1
        if settings.in_memory:
            how: Any = {"repeats": repeats, "shift": settings.shift or 0, "flip": settings.flip}
            self.data = MemoryBatches(*in_memory(self.train, inputs), share, inputs.normalise, seed, **how)
        else:
            self.train.transform = train_transform(inputs, settings)
            self.data = ImageBatches(self.train, share, seed, repeats, settings.workers)
        teacher = teacher and teacher.to(accelerator.device)
        self.objective = Objective(settings, self.model, classes, multi_label, teacher)
        self.loader = accelerator.prepare_data_loader(validation_loader(settings, validation, self.model))
        self.groups = parameter_groups(
            self.model,
            weight_decay=settings.weight_decay,
            layer_decay=settings.layer_decay,
            backbone_lr_scale=settings.backbone_lr_scale,
        )
        self.ranked_by = "mAP" if multi_label else "top1"

    def loss(self, forward: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.objective(forward, inputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = evaluate(model, self.loader, accelerator=self.accelerator)
        return {name: value for name, value in found.items() if name not in ("images", "images_per_second")}

    def begin_epoch(self, epoch: int) -> None:
        rates = self.settings.patch_drop_rates
        if any(rates):
            self.model.patch_drop.prob = rates[epoch] if epoch < len(rates) else 0.0  # type: ignore[union-attr]

    def begin_step(self, epoch: int, groups: Sequence[dict[str, Any]]) -> None:
        if epoch < self.settings.frozen_epochs:
            freeze_backbone(groups)

    def about(self) -> dict[str, str]:
        return {name: str(getattr(self.settings, name)) for name in ("model", "dataset", "method", "keep_rate")}

    def fingerprints(self) -> dict[str, str]:
        return {**self.start, "training images": self.train.fingerprint()}


def build_models(
    settings: TrainingSettings, classes: int, checkpoint: Checkpoint | None = None, given: nn.Module | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """Return the model to train, reduced as settings say, and its dense teacher if it has one.

    `classes` is the number of classes of the data, `checkpoint` what the settings' file holds if it was read already,
    and `given` a model that is trained instead of the one that settings name.
    """
    seed_everything(settings.seed, "model")
    pool = {} if settings.global_pool is None else {"global_pool": settings.global_pool}
    known: int | None  # classes of the starting weights; None without a head
    if given is None:
        drop = {"patch_drop_rate": max(settings.patch_drop_rates)} if any(settings.patch_drop_rates) else {}
        spec = ModelSpec(
            settings.model,
            None if settings.checkpoint is None else Path(settings.checkpoint),
            settings.pretrained,
            num_classes=classes,
            options={"drop_path_rate": settings.drop_path, **drop, **pool},
            new_head=True,
            from_scratch=settings.from_scratch,
        )
        if checkpoint is None and spec.checkpoint is not None:
            checkpoint = Checkpoint.read(spec.checkpoint)
        model = build(spec, checkpoint)
        published = known_of(model).num_pretrained_classes if settings.pretrained else None
        known = published if checkpoint is None else checkpoint.head_classes
    elif applied_modules(given):
        raise ValueError("this model is reduced already: call agglo.remove(model) first, then say method=")
    else:
        known, model = class_count(given) or None, given
        if known != classes:
            set_classes(model, classes)
    if settings.head_std is not None and known != classes and (name := head_name(model)) is not None:
        head: Any = model.get_submodule(name)
        nn.init.trunc_normal_(head.weight, std=settings.head_std)
    teacher = None
    if settings.distill and settings.teacher is not None:
        teacher = build(ModelSpec(settings.model, Path(settings.teacher), num_classes=classes, options=pool))
    elif settings.distill and known != classes:
        raise ValueError(
            f"distill=true needs a teacher that knows the {classes} classes of the data; the starting weights "
            f"know {known or 'none'}: give teacher=F, the dense model trained on this data"
        )
    elif settings.distill:
        teacher = deepcopy(model)
    if settings.config is not None:
        apply(model, settings.config)
        if checkpoint is not None and checkpoint.method:
            load_method(model, checkpoint.method, f"checkpoint={checkpoint.source!r}")
    return model, teacher and teacher.eval().requires_grad_(False)


def open_splits(settings: TrainingSettings, root: Path) -> tuple[ClassificationData, ClassificationData]:
    """Open the training and the validation split of the settings' data set, without transforms yet."""
    train, validation = (open_split(settings.dataset, root, split) for split in ("train", "val"))
    if one_sided := sorted(set(train.classes) ^ set(validation.classes)):
        raise ValueError(
            f"{len(one_sided)} classes are in only one of the splits of data={str(root)!r}: {', '.join(one_sided[:5])}"
        )
    return train, validation


def validation_loader(settings: TrainingSettings, split: ClassificationData, model: nn.Module) -> DataLoader[Any]:
    """Return batches of the whole validation split, prepared for the model."""
    inputs = inputs_for(model, settings.dataset)
    data: Any = split
    if settings.in_memory:
        images, targets = in_memory(data, inputs)
        data = TensorDataset(inputs.normalise(images), targets)
    else:
        data.transform = evaluation_transform(inputs)
    return DataLoader(data, settings.evaluation_batch_size, num_workers=settings.workers)


def in_memory(data: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return all images (N, C, H, W) uint8 and targets of a data set whose images have the model's size."""
    images, targets = zip(*(data[index] for index in range(len(data))), strict=True)
    pixels = [torch.from_numpy(np.atleast_3d(image).transpose(2, 0, 1).copy()) for image in images]
    wanted = (len(inputs.mean), *inputs.image_size)
    if others := sorted({tuple(image.shape) for image in pixels} - {wanted}):
        raise ValueError(f"in_memory=true needs images of {wanted}, as the model does; {data.name} has {others[:3]}")
    return torch.stack(pixels), torch.stack([torch.as_tensor(target) for target in targets])


def parameter_groups(
    model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0, backbone_lr_scale: float = 1.0
) -> list[Group]:
    """Return groups for AdamW, each with `lr_scale`, `backbone`, which `freeze_backbone` reads, and `names`.

    timm's schedulers multiply all rates by `lr_scale`, the smallest and warm-up rates too.

    Vectors, biases and what the model excludes (position embeddings, class token) do not decay. A rate's factor is
    backbone_lr_scale for the backbone, times layer_decay^(depth + 1 - id), where id is 0 for the embeddings, i + 1 for
    block i and depth + 1 for what follows them, the final norm included, and for what a method learns.
    """
    from timm.optim import param_groups_layer_decay

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    undecayed: Any = [name for name in names.values() if not (_POSITIONS | _TOKENS).isdisjoint(name.split("."))]
    if hasattr(model, "group_matcher"):  # of timm
        undecayed = getattr(model, "no_weight_decay", set)()
    elif layer_decay != 1:
        raise ValueError(f"layer_decay={layer_decay:g} needs a model of timm, not {type(model).__name__}")
    groups: dict[tuple[float, float, bool], Group] = {}
    for layer in param_groups_layer_decay(model, weight_decay, undecayed, layer_decay=layer_decay):
        for parameter in layer["params"]:
            name = names[id(parameter)]
            # timm counts the final norm to the last block, MAE to what follows the blocks.
            follows = name.startswith("norm.") or _METHOD in name.split(".")
            backbone = _NEW.isdisjoint(name.split("."))
            scale = (1.0 if follows else layer["lr_scale"]) * (backbone_lr_scale if backbone else 1.0)
            key = (scale, layer["weight_decay"], backbone)
            empty: Group = {"lr_scale": scale, "weight_decay": key[1], "backbone": backbone, "params": [], "names": []}
            group = groups.setdefault(key, empty)
            group["params"].append(parameter)
            group["names"].append(name)
    return list(groups.values())


def freeze_backbone(groups: Sequence[Group]) -> None:
    """Set the learning rate of the backbone to 0 for the next step, and so its weight decay.

    The optimiser's moments are still updated, as in the paper.
    """
    for group in groups:
        if group["backbone"]:
            group["lr"] = 0.0
