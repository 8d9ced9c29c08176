"""Accuracy and speed of a classifier, dense and reduced by every config of a grid, in tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from agglo.config import ReductionConfig
from agglo.lab.evaluation.configs import Configs
from agglo.lab.evaluation.grid import EvaluationGrid, GridCell, Reducible, about_data, run_grid
from agglo.lab.evaluation.report import TaskMetrics
from agglo.lab.tasks.classification.data import ClassificationData, open_split
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.models.checkpoints import Checkpoint, fingerprint
from agglo.models.libraries import class_count
from agglo.models.opening import ModelSpec, build
from agglo.models.outputs import logits_in
from agglo.models.zero_shot import imagenet_names
from agglo.utils.devices import dtype_named
from agglo.utils.journal import Journal
from agglo.utils.progress import progress
from agglo.utils.timing import timed_pass

if TYPE_CHECKING:
    from accelerate import Accelerator

METRICS = TaskMetrics({"top1": "top-1", "top5": "top-5", "mAP": "mAP"}, ("top1", "mAP"), fractions=("top1", "top5"))


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation: a classifier, a data set, and the reductions that are the cells of the grid.

    Tuning takes its own, without reductions.

    Attributes:
        dataset: One of `data.dataset_names()`; None recognises it by its files.
        images: How many images, evenly spread over the data set; None is all.
        crop: Fraction of the resized image that is left; None is what `frame` says.
        frame: How images are resized and cropped, "study" or "model"; see `inputs_for`.
        cache_gigabytes: Memory per process up to which decoded images are kept for the next cell.
    """

    model: ModelSpec
    data: Path
    configs: Configs = field(default_factory=dict)
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
    prepared_by = ("image_size", "mean", "std", "interpolation", "crop", "squash")

    def __init__(self, settings: EvaluationSettings) -> None:
        super().__init__(settings)
        self.data = open_split(settings.dataset, settings.data, "val")
        self.spec = spec = prompted(settings.model, self.data)
        checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
        self.model = build(spec, checkpoint)
        # Weights that a method learned; None where the model's own weights are random too.
        learned = None if spec.has_random_weights else {} if checkpoint is None else dict(checkpoint.method)
        own = "pretrained" if spec.takes_own_weights else str(spec.checkpoint)
        self.source = "random" if spec.has_random_weights else own
        self.reducible = Reducible(self.model, learned, f"checkpoint {self.source}")
        self.weights = fingerprint({**self.model.state_dict(), **(learned or {})})
        self.model.to(self.device, dtype_named(settings.dtype))
        self.inputs = inputs_for(self.model, self.data.name, settings.frame)
        if settings.crop is not None:
            self.inputs = replace(self.inputs, crop=settings.crop, squash=False)
        self.data.transform = evaluation_transform(self.inputs, normalise=False)
        self.images, self.workers = spread(self.data, settings.images), settings.workers
        self.fits_in_memory = self.images[0][0].nbytes * len(self.images) <= settings.cache_gigabytes * 1e9

    def evaluate(self, cells: Sequence[GridCell], journal: Journal) -> None:
        if not cells:
            return
        keep = len(cells) > 1 and self.fits_in_memory
        steps = len(self._loader()) * len(cells) + keep * len(self._decoding())
        with progress(steps, f"batches of {self.settings.batch_size}", every_seconds=10, quiet=self.quiet) as advance:
            if keep:
                self.keep_images(advance)
            for cell in cells:
                journal.add(cell.key, {**cell.about, **self._measured(cell, advance)})

    def one(self, config: ReductionConfig | None) -> dict[str, Any]:
        """Return the result of one cell, for callers who keep results themselves; None is the dense model."""
        [cell] = self.reducible.cells({} if config is None else {config: config.method}, dense=config is None)
        if self.fits_in_memory and not isinstance(self.images, list):
            self.keep_images(lambda title: None)
        return {**cell.about, **self._measured(cell, lambda title: None)}

    def _decoding(self) -> DataLoader[Any]:
        return DataLoader(self.images, self.settings.batch_size, num_workers=self.workers)

    def _loader(self) -> Any:
        """Return the batches of this process: images (B, C, H, W) as bytes, and targets."""
        if self.accelerator is None:
            return self._decoding()
        return self.accelerator.prepare_data_loader(self._decoding(), device_placement=False)

    def keep_images(self, advance: Callable[[str], None]) -> None:
        """Decode all images once, and keep them as bytes for every cell."""
        kept: list[tuple[Tensor, Tensor]] = []
        for images, targets in self._decoding():
            # What workers send lies in shared memory, with open files for as long as it is kept: hence the copies.
            kept += zip(images.clone(), targets.clone(), strict=True)
            advance("reading images")
        self.images, self.workers = kept, 0

    def _measured(self, cell: GridCell, advance: Callable[[str], None]) -> dict[str, Any]:
        require_same_classes(self.model, self.data)
        self.reducible.apply(cell.config)
        return evaluate(
            self.model,
            self._loader(),
            accelerator=self.accelerator,
            prepare=self.inputs.normalise,
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
            "data": about_data(self.data, chosen=chosen, root=settings.data, images=len(self.images)),
            "inputs": {**asdict(self.inputs), "in_words": str(self.inputs)},
        }


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


def prompted(spec: ModelSpec, data: ClassificationData | None = None) -> ModelSpec:
    """Return the spec with class names in its prompts: those given, the data set's, or ImageNet's."""
    if spec.prompts is None:
        return spec
    if data is None or data.name == "imagenet":  # whose classes are WordNet ids
        own = tuple(imagenet_names())
    else:
        own = tuple(" ".join(name.replace("_", " ").split()) for name in data.classes)
    names = own if spec.prompts.class_names is None else spec.prompts.class_names
    if data is not None and len(names) != len(data.classes):
        raise ValueError(f"{len(names)} class names for the {len(data.classes)} classes of {data.name}: one each")
    return replace(spec, prompts=replace(spec.prompts, class_names=names))


# Not torchmetrics' metrics: there a logit that is not a number counts as the highest, ties among the five highest go by
# no rule, and average precision goes through a sigmoid where a batch happens to have values outside of 0 to 1, which
# makes large logits equal.


def ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Return how many classes each image's own class (B,) comes after, by logits (B, classes).

    Of classes with equal logits the lowest comes first.
    """
    classes = logits.shape[1]
    own = logits.gather(1, targets[:, None])
    before = torch.arange(classes, device=logits.device) < targets[:, None]
    rank = ((logits > own) | ((logits == own) & before)).sum(dim=1)
    # NaN beats nothing and nothing beats it: without this it would be correct.
    return rank.masked_fill(own.isnan()[:, 0], classes)


def mean_average_precision(logits: Tensor, targets: Tensor) -> float:
    """Return the mean average precision over classes; a class that no image shows counts as 0, as in the paper.

    Args:
        logits: (B, classes); a sigmoid would change no order, and lose some.
        targets: (B, classes) of 0 and 1.
    """
    per_class = [average_precision(*column) for column in zip(logits.T, targets.T.bool(), strict=True)]
    return float(torch.stack(per_class).nan_to_num(0).mean())


def average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the average precision of scores (N,) for positives (N,) bool; NaN without positives.

    It is the mean over the positives of the precision among all images that score at least as high, so that the order
    of images with equal scores does not matter.
    """
    scores, order = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True)
    hits = positive[order]
    # Equal scores are seen at once: each position counts all images up to the last of its equals.
    _, lengths = scores.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    precision = hits.cumsum(0)[ends - 1].double() / ends
    return precision[hits].mean()


def evaluate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    accelerator: Accelerator | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Return "top1" and "top5", or "mAP", "images", and "images_per_second" of the model alone.

    Args:
        model: A classifier, whose mode is put back at the end.
        loader: Batches of images and targets: classes (B,), or 0 and 1 for several labels per image (B, classes).
        accelerator: The Accelerator of a run on several processes; the loader is then what its `prepare` returned.
            Every process returns the numbers of all images.
        prepare: Applied to inputs on the model's device before it runs, such as normalisation; not timed.
        advance: Called with the number of images done after each batch.

    The speed is the median over batches, so that a machine that stalls now and then does not spoil it, without the
    first one, which compiles kernels and fills caches; a batch that is alone runs twice. Speeds of several processes
    add up.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    speeds: list[float] = []
    seen: list[tuple[Tensor, ...]] = []
    try:
        with torch.inference_mode():
            for inputs, targets in loader:
                inputs, targets = inputs.to(like.device), targets.to(like.device)
                inputs = (inputs if prepare is None else prepare(inputs)).to(like.dtype)
                spent, logits = _run(model, inputs, accelerator)
                speeds.append(len(inputs) / spent)
                if accelerator is not None:
                    logits, targets = accelerator.gather_for_metrics((logits, targets))
                several = targets.dim() == 2
                found = (logits.float(), targets) if several else (ranks(logits, targets),)
                seen.append(tuple(part.cpu() for part in found))
                if advance is not None:
                    advance(len(targets))
            if not seen:
                raise ValueError("data has no images")
            if len(speeds) == 1:
                speeds.append(len(inputs) / _run(model, inputs, accelerator)[0])
    finally:
        model.train(was_training)
    speed = median(speeds[1:] or [0.0])
    if accelerator is not None:
        speed = float(accelerator.reduce(torch.tensor([speed], device=like.device), "sum"))
    columns = [torch.cat(parts) for parts in zip(*seen, strict=True)]
    images = len(columns[0])
    if several:
        quality = {"mAP": 100 * mean_average_precision(*columns)}
    else:
        largest = (1, 5) if logits.shape[1] > 5 else (1,)
        quality = {f"top{k}": 100 * int((columns[0] < k).sum()) / images for k in largest}
    return {**quality, "images": images, "images_per_second": speed}


def _run(model: nn.Module, inputs: Tensor, accelerator: Accelerator | None) -> tuple[float, Tensor]:
    with nullcontext() if accelerator is None else accelerator.autocast():
        spent, answer = timed_pass(model, inputs)
    return spent, logits_in(answer)
