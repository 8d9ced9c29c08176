"""From settings to what is trained: the model with its reduction, the teacher, the data."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from agglo.classification.data.registry import dataset_named
from agglo.classification.data.transforms import (
    STUDY,
    Inputs,
    Normalise,
    evaluation_transform,
    inputs_for,
    train_transform,
)
from agglo.classification.training.settings import AUGMENTATION_SETTINGS, TrainingSettings
from agglo.experiments.checkpoints import Checkpoint, load_method
from agglo.experiments.libraries import library_of
from agglo.experiments.libraries.heads import class_count, head_name, set_classes
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.randomness import seed_everything
from agglo.experiments.training.batches import ImageBatches, MemoryBatches, Share, TrainingData
from agglo.experiments.training.reduction import reduce
from agglo.hosts.registry import applied_modules


def starting_weights(settings: TrainingSettings) -> Checkpoint | None:
    """The file of weights that training starts from; None if there is none."""
    return None if settings.checkpoint is None else Checkpoint.read(Path(settings.checkpoint))


def build_models(
    settings: TrainingSettings, classes: int, checkpoint: Checkpoint | None = None, given: nn.Module | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """The model to train, reduced as settings say, and its dense teacher if it has one.

    checkpoint: the `starting_weights`, if they were read already. given: trained in place of what settings name.
    """
    seed_everything(settings.seed, "model")
    checkpoint = starting_weights(settings) if checkpoint is None else checkpoint
    known, model = _of_object(given, classes) if given is not None else _of_settings(settings, classes, checkpoint)
    if settings.head_std is not None and known != classes and (name := head_name(model)) is not None:
        head: Any = model.get_submodule(name)
        nn.init.trunc_normal_(head.weight, std=settings.head_std)
    teacher = None
    if settings.distill:
        teacher = _teacher(settings, model, known, classes)
    if settings.method != "none":
        reduce(model, settings)
        if checkpoint is not None and checkpoint.method:
            load_method(model, checkpoint.method, f"checkpoint={checkpoint.source!r}")
    return model, teacher


def _of_settings(
    settings: TrainingSettings, classes: int, checkpoint: Checkpoint | None
) -> tuple[int | None, nn.Module]:
    """How many classes the starting weights tell apart, None if they have no head; and the model with them."""
    options: dict[str, Any] = {"drop_path_rate": settings.drop_path}
    if any(settings.patch_drop_rates):
        options["patch_drop_rate"] = max(settings.patch_drop_rates)
    if settings.global_pool is not None:
        options["global_pool"] = settings.global_pool
    path = None if settings.checkpoint is None else Path(settings.checkpoint)
    spec = ModelSpec(
        settings.model,
        path,
        settings.pretrained,
        num_classes=classes,
        options=options,
        new_head=True,
        from_scratch=settings.from_scratch,
    )
    model = build(spec, checkpoint)
    if checkpoint is not None:
        return checkpoint.head_classes, model
    library = library_of(model)
    return library.taught(model) if settings.pretrained and library is not None else None, model


def _of_object(model: nn.Module, classes: int) -> tuple[int | None, nn.Module]:
    """The same of a model that a person has built: it gets a new head where its own is of other classes."""
    if applied_modules(model):
        raise ValueError(
            "this model is reduced already: call agglo.remove(model) first; method= says how it is trained"
        )
    known = class_count(model) or None
    if known != classes:
        set_classes(model, classes)
    return known, model


def _teacher(settings: TrainingSettings, model: nn.Module, known: int | None, classes: int) -> nn.Module:
    """A dense model that knows the classes: of its own weights, or the model to be trained before it is.

    known: how many classes the starting weights tell apart.
    """
    if settings.teacher is not None:
        pool = {} if settings.global_pool is None else {"global_pool": settings.global_pool}
        teacher = build(ModelSpec(settings.model, Path(settings.teacher), num_classes=classes, options=pool))
    else:
        if known != classes:
            raise ValueError(
                f"distill=true needs a teacher that knows the {classes} classes of the data; the starting weights "
                f"know {known or 'none'}: give teacher=F, the dense model trained on this data"
            )
        teacher = deepcopy(model)
    return teacher.eval().requires_grad_(False)


@dataclass(frozen=True)
class Splits:
    """The data of a run, before it is known for which model: splits of one dataset."""

    train: Any
    validation: Any

    @property
    def classes(self) -> int:
        return len(self.train.classes)

    @property
    def multi_label(self) -> bool:
        return bool(self.train.multi_label)

    @property
    def skipped(self) -> list[str]:
        """Images that are left out, in words."""
        return [*self.train.skipped, *self.validation.skipped]


def open_splits(settings: TrainingSettings, root: Path) -> Splits:
    """Both splits of the settings' dataset, without transforms yet."""
    from agglo.classification.data import open_split

    train, validation = (
        open_split(settings.dataset, root, split, skip_bad=settings.skip_bad) for split in ("train", "val")
    )
    splits = Splits(train, validation)
    one_sided = sorted(set(splits.train.classes) ^ set(splits.validation.classes))
    if one_sided:
        some = ", ".join(one_sided[:5]) + (", ..." if len(one_sided) > 5 else "")
        raise ValueError(f"{len(one_sided)} classes are in only one of the splits of data={str(root)!r}: {some}")
    return splits


def training_data(settings: TrainingSettings, splits: Splits, model: nn.Module, share: Share) -> TrainingData:
    """Augmented batches for a model."""
    from timm.data.random_erasing import RandomErasing

    # Only sizes and colours are the model's: crops are random here.
    inputs = inputs_for(model, settings.dataset, STUDY)
    repeats = settings.repeated_augmentation if share.processes > 1 else 1
    if settings.in_memory:
        images, targets = in_memory(splits.train, inputs)
        erase = RandomErasing(settings.erasing, mode="pixel", device="cpu") if settings.erasing else None
        return MemoryBatches(
            images,
            targets,
            share,
            prepare=Normalise(inputs.mean, inputs.std),
            seed=settings.seed,
            repeats=repeats,
            shift=settings.shift or 0,
            flip=settings.flip,
            erase=erase,
        )
    chosen = {name: getattr(settings, name) for name in AUGMENTATION_SETTINGS}
    splits.train.transform = train_transform(inputs, replace(dataset_named(settings.dataset).augmentation, **chosen))
    return ImageBatches(splits.train, share, seed=settings.seed, repeats=repeats, workers=settings.workers)


def validation_loader(settings: TrainingSettings, splits: Splits, model: nn.Module) -> DataLoader[Any]:
    """Batches of the whole validation split, as the model wants its images."""
    inputs = inputs_for(model, settings.dataset)
    data: Any = splits.validation
    if settings.in_memory:
        images, targets = in_memory(data, inputs)
        data = TensorDataset(Normalise(inputs.mean, inputs.std)(images), targets)
    else:
        data.transform = evaluation_transform(inputs)
    return DataLoader(data, settings.evaluation_batch_size, num_workers=settings.workers)


def in_memory(data: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """All images (N, C, H, W) uint8 and targets of a dataset of images that are what the model takes as they are."""
    import numpy as np

    images, targets = [], []
    for index in range(len(data)):
        image, target = data[index]
        pixels = torch.from_numpy(np.array(image))
        images.append(pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1))
        targets.append(torch.as_tensor(target))
    wanted = (len(inputs.mean), *inputs.image_size)
    others = sorted({tuple(image.shape) for image in images} - {wanted})
    if others:
        raise ValueError(f"in_memory=true needs images of {wanted}, as the model does; {data.name} has {others[:3]}")
    return torch.stack(images), torch.stack(targets)
