"""Accuracy and speed of a classifier, dense and reduced by every config of a grid, in tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from agglo.config import ReductionConfig
from agglo.lab.evaluation.configs import Configs
from agglo.lab.evaluation.grid import EvaluationGrid, GridCell, Reducible, about_data, run_grid
from agglo.lab.evaluation.report import Quality
from agglo.lab.tasks.classification.data import ClassificationData, detect, open_split
from agglo.lab.tasks.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation.metrics import evaluate
from agglo.models.checkpoints import Checkpoint, fingerprint
from agglo.models.libraries import class_count
from agglo.models.opening import ModelSpec, build
from agglo.models.zero_shot import imagenet_names
from agglo.utils.devices import dtype_named
from agglo.utils.journal import Journal
from agglo.utils.progress import progress

if TYPE_CHECKING:
    from accelerate import Accelerator

QUALITY = Quality({"top1": "top-1", "top5": "top-5", "mAP": "mAP"}, ("top1", "mAP"), fractions=("top1", "top5"))
_GIGABYTE = 1e9


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation: a classifier, a data set, and the reductions that are the cells of the grid.

    Attributes:
        dataset: One of `data.dataset_names()`; None recognises it by its files.
        images: How many images, evenly spread over the data set; None is all.
        crop: Fraction of the resized image that is left; None is what `frame` says.
        frame: How images are resized and cropped, "study" or "model"; see `inputs_for`.
        cache_gigabytes: Memory per process up to which decoded images are kept for the next cell.
    """

    model: ModelSpec
    data: Path
    configs: Configs
    dense: bool = True
    dataset: str | None = None
    images: int | None = None
    crop: float | None = None
    frame: str | None = None
    batch_size: int = 64
    workers: int = 2
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    cache_gigabytes: float = 4.0


def run(settings: EvaluationSettings, json_path: Path | None = None) -> dict[str, Any]:
    """Evaluate all cells and return the report; see `run_grid`."""
    return run_grid(Evaluation, settings, json_path)


class Evaluation(EvaluationGrid):
    """The grid of a classifier."""

    prepared_by = ("image_size", "mean", "std", "interpolation", "crop", "squash")

    def __init__(self, settings: EvaluationSettings) -> None:
        super().__init__(settings)
        name = detect(settings.data) if settings.dataset is None else settings.dataset
        self.data = open_split(name, settings.data, "val")
        self.spec = spec = prompted(settings.model, self.data)
        checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
        self.model = build(spec, checkpoint)
        require_same_classes(self.model, self.data)
        # Weights that a method learned; None where the model's own weights are random too.
        learned = None if spec.has_random_weights else {} if checkpoint is None else dict(checkpoint.method)
        own = "pretrained" if spec.takes_own_weights else str(spec.checkpoint)
        self.source = "random" if spec.has_random_weights else own
        self.reducible = Reducible(self.model, learned, f"checkpoint {self.source}")
        self.weights = fingerprint({**self.model.state_dict(), **(learned or {})})
        self.model.to(self.device, dtype_named(settings.dtype))
        self.inputs = inputs_for(self.model, name, settings.frame)
        if settings.crop is not None:
            self.inputs = replace(self.inputs, crop=settings.crop, squash=False)
        self.data.transform = evaluation_transform(self.inputs, normalise=False)
        images = spread(self.data, settings.images)
        self.store = ImageStore(images, settings.batch_size, settings.workers, self.accelerator)
        self.fits_in_memory = self.store.bytes_needed <= settings.cache_gigabytes * _GIGABYTE

    def evaluate(self, cells: Sequence[GridCell], journal: Journal) -> None:
        if not cells:
            return
        keep = len(cells) > 1 and self.fits_in_memory
        steps, what = len(self.store.loader()) * (len(cells) + keep), f"batches of {self.settings.batch_size}"
        with progress(steps, what, every_seconds=10, quiet=self.quiet) as advance:
            if keep:
                self.store.keep(lambda images: advance("reading images"))
            for cell in cells:
                journal.add(cell.key, {**cell.about, **self._measured(cell, advance)})

    def one(self, config: ReductionConfig | None) -> dict[str, Any]:
        """Return the result of one cell, for callers who keep results themselves; None is the dense model."""
        [cell] = self.reducible.cells({} if config is None else {config: config.method}, dense=config is None)
        if self.fits_in_memory and not self.store.kept:
            self.store.keep(lambda images: None)
        return {**cell.about, **self._measured(cell, lambda title: None)}

    def _measured(self, cell: GridCell, advance: Callable[[str], None]) -> dict[str, Any]:
        self.reducible.apply(cell.config)
        return evaluate(
            self.model,
            self.store.loader(),
            accelerator=self.accelerator,
            prepare=Normalise(self.inputs.mean, self.inputs.std),
            advance=lambda images: advance(cell.title),
        )

    def about(self) -> dict[str, Any]:
        settings, prompts = self.settings, self.spec.prompts
        chosen = "found by its files" if settings.dataset is None else "as asked"
        model: dict[str, Any] = {"name": settings.model.name, "weights": self.source, "fingerprint": self.weights}
        if prompts is not None:
            model["prompts"] = {"classes": prompts.class_names, "templates": prompts.templates}
        return {
            "model": model,
            "data": about_data(self.data, chosen=chosen, root=settings.data, images=len(self.store.data)),
            "inputs": {**asdict(self.inputs), "in_words": str(self.inputs)},
        }


class ImageStore:
    """Batches of images and targets, the same ones every time: decoded again, or once and kept as bytes.

    Args:
        data: Returns an image as bytes (C, H, W) and its target for an index.
        batch_size: Number of images in every batch but the last.
        workers: Processes that decode.
        accelerator: Gives every process its part, which is then all that it keeps. The last batches are filled up
            with images from the start, so that all processes have as many.
    """

    def __init__(self, data: Any, batch_size: int, workers: int = 0, accelerator: Accelerator | None = None) -> None:
        self.data, self._batch_size, self._workers, self._accelerator = data, batch_size, workers, accelerator
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes_needed(self) -> int:
        """Bytes that this process needs to keep all its images."""
        processes = 1 if self._accelerator is None else self._accelerator.num_processes
        return int(self.data[0][0].nbytes) * -(-len(self.data) // processes)

    def loader(self) -> Any:
        """Return the batches: images (B, C, H, W) and targets."""
        kept: Any = self.kept
        return self._load(Subset(kept, range(len(self.data))), 0) if kept else self._load(self.data, self._workers)

    def keep(self, advance: Callable[[int], None]) -> None:
        """Decode everything and keep it. advance: called with the number of images after each batch."""
        for indices, (images, targets) in self._load(_Indexed(self.data), self._workers):
            # What workers send lies in shared memory, with open files for as long as it is kept: hence the copies.
            self.kept.update(zip(indices.tolist(), zip(images.clone(), targets.clone(), strict=True), strict=True))
            advance(len(indices))

    def _load(self, data: Dataset[Any], workers: int) -> Any:
        loader = DataLoader(data, self._batch_size, num_workers=workers)
        if self._accelerator is None:
            return loader
        return self._accelerator.prepare_data_loader(loader, device_placement=False)


class _Indexed(Dataset[Any]):
    """A data set whose items come with their indices."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._data[index]


def spread(data: ClassificationData, images: int | None) -> Any:
    """Return a subset of the given size, evenly spread over the data set; None is all of it."""
    if images is None or images >= len(data):
        return data
    return Subset(data, [index * len(data) // images for index in range(images)])


def require_same_classes(model: Any, data: ClassificationData) -> None:
    """Raise a ValueError unless the model's head has as many classes as the data."""
    classes = class_count(model)
    if not classes:
        raise ValueError(
            f"{type(model).__name__} has no head: give --checkpoint, of a classifier of these classes, or "
            "--zero-shot for a model of images and texts"
        )
    if classes != len(data.classes):
        hint = "; --dataset folder numbers the folders there are" if data.name == "imagenet" else ""
        raise ValueError(
            f"the model has {classes} classes, {data.name} has {len(data.classes)}: a checkpoint "
            f"trained on these classes, or data of the model's, is needed{hint}"
        )


def prompted(spec: ModelSpec, data: ClassificationData) -> ModelSpec:
    """Return the spec with class names in its prompts, if it has prompts: those given, or else the data set's."""
    if spec.prompts is None:
        return spec
    names = spec.prompts.class_names
    if names is None:  # words instead of ImageNet's WordNet ids, and of names with underscores
        plain = (" ".join(name.replace("_", " ").split()) for name in data.classes)
        names = tuple(imagenet_names() if data.name == "imagenet" else plain)
    if len(names) != len(data.classes):
        raise ValueError(f"{len(names)} class names for the {len(data.classes)} classes of {data.name}: one each")
    return replace(spec, prompts=replace(spec.prompts, class_names=names))
