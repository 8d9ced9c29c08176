"""What items about classifiers share: the methods of the study, evaluation and fine-tuning of one cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.fashion_mnist import find_idx, read_idx, write_idx
from agglo.experiments.files import replacing
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.run_folder import RunFolder
from agglo.experiments.variants import Variant
from agglo.methods import create
from agglo.patching import reduction, remove
from agglo.reproduce.item import CannotRunError, Need, Settings
from agglo.schedule import Schedule

RATES = (0.25, 0.5, 0.7, 0.9)
DENSE = "dense"
FASHION = "fashion-mnist"
TRAINING_IMAGES = 6000  # of Fashion-MNIST, that a cell of a miniature is trained on
RECIPE = Path(__file__).parent / "items" / "miniature.toml"


@dataclass(frozen=True)
class Entry:
    """One line of the tables.

    learns: nothing can be said about it off the shelf. proportional: as in `agglo.apply`; None is the method's own.
    """

    name: str
    method: str
    linkage: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    learns: bool = False
    proportional: bool | None = None

    @property
    def all_options(self) -> dict[str, Any]:
        """What the method is created with."""
        return {**self.options, **({} if self.linkage is None else {"linkage": self.linkage})}

    def variant(self, keep_rate: float | None = None, schedule: Schedule | None = None, **how: Any) -> Variant:
        how = {"proportional": self.proportional, **how}
        return Variant(self.name, create(self.method, **self.all_options), keep_rate, schedule=schedule, **how)


LINKAGES = ("single", "average", "complete")
ATC = tuple(Entry(f"atc {linkage}", "atc", linkage) for linkage in LINKAGES)
# Without proportional attention the released code does not track sizes at all.
RELEASED = tuple(
    Entry(f"atc {linkage} as released", "atc", linkage, {"sizes": "ignored"}, proportional=False)
    for linkage in LINKAGES
)
PRUNING = (Entry("l1", "l1"), Entry("l2", "l2"), Entry("linf", "linf"), Entry("topk", "topk"), Entry("evit", "evit"))
PAPER = (
    *PRUNING,
    Entry("dynamicvit", "dynamicvit", learns=True),
    Entry("ats", "ats"),
    Entry("tome", "tome"),
    Entry("kmedoids", "kmedoids"),
    Entry("dpc_knn", "dpc_knn", learns=True),
    Entry("sit", "sit", learns=True),
    Entry("patch_merger", "patch_merger", learns=True),
    Entry("sinkhorn", "sinkhorn", learns=True),
    *ATC,
)
# That the paper has in detection only, or not at all.
FURTHER = (
    Entry("random", "random", options={"seed": 0}),
    Entry("dynamicvit_prsv", "dynamicvit_prsv", learns=True),
    Entry("svit", "svit", learns=True),
    Entry("evovit", "evovit"),
    Entry("pool", "pool"),
    Entry("dpc_knn equal", "dpc_knn", options={"weights": "equal"}),
)
ALL = (*PAPER, *FURTHER)
# Of other authors, as the paper counts them.
HARD = ("kmedoids", "dpc_knn", "tome")
SOFT = ("sit", "patch_merger", "sinkhorn")
OURS = tuple(entry.name for entry in ATC)


def named(entries: Sequence[Entry], name: str) -> Entry:
    return next(entry for entry in entries if entry.name == name)


def data_need(name: str) -> Need:
    about = {
        "imagenet": "ImageNet-1K, val/ and for training train/",
        "nabirds": "NABirds",
        "coco": "COCO 2014 with its annotations",
        "nuswide": "NUS-WIDE with nus_wid_data.csv",
        FASHION: "Fashion-MNIST's four idx files",
    }
    return Need("data", name, about[name])


def on_data(model: str, data: str) -> str:
    """What weights of a model are called that were trained on a data set: the published ones are ImageNet's."""
    return model if data == "imagenet" else f"{model}.{data}"


class Evaluator:
    """Evaluates one way of reducing a model after the other; a model and its images stay open while they are asked for.

    images: of the data set, evenly spread; None is all.
    """

    def __init__(self, settings: Settings, *, images: int | None = None, batch_size: int = 64) -> None:
        self.settings, self.images, self.batch_size = settings, images, settings.batch_size or batch_size
        self._open: tuple[Any, Any] | None = None

    def __call__(
        self, spec: ModelSpec, data: str, root: Path, variant: Variant | None, *, crop: float | None = None
    ) -> dict[str, Any]:
        """top1 and top5, or mAP; images, counts, gflops, and which weights and data these were."""
        from agglo.classification.evaluation.grid import Evaluation, EvaluationSettings
        from agglo.hosts.swap import UnsupportedModelError

        key = (str(spec), data, root, crop)
        if self._open is None or self._open[0] != key:
            self._open = None  # what was open is let go before more is read
            chosen = EvaluationSettings(
                spec,
                root,
                [],
                dataset=data,
                images=self.images,
                crop=crop,
                batch_size=self.batch_size,
                workers=0 if self.settings.miniature else 2,  # small images are read faster than processes start
                device=self.settings.device,
            )
            self._open = (key, Evaluation(chosen))
        evaluation = self._open[1]
        try:
            found = evaluation.one(variant)
        except (ValueError, UnsupportedModelError) as error:
            raise CannotRunError(str(error)) from error
        finally:
            remove(evaluation.model)
        kept = ("top1", "top5", "mAP", "images", "images_per_second", "counts", "varies", "gflops")
        about = {"reduction": _in_words(variant), "weights": evaluation.weights}
        about["data_fingerprint"] = evaluation.data.fingerprint()
        return {**{name: found[name] for name in kept if name in found}, **about}


def _in_words(variant: Variant | None) -> str | None:
    if variant is None:
        return None
    on = variant.proportional
    attention = None if on is None else f"proportional attention {'on' if on else 'off'}"
    dropped = "unread patches dropped" if variant.unread == "drop" else None
    return ", ".join(filter(None, (variant.method_text, attention, variant.acts, dropped)))


def embedded_spec(image_size: int | None = None) -> ModelSpec:
    size = None if image_size is None else (image_size, image_size)
    return ModelSpec(embedded.NAME, pretrained=True, image_size=size)


def fine_tune(
    settings: Settings,
    recipe: str,
    choices: Mapping[str, Any],
    entry: Entry | None,
    data: Path,
    folder: Path,
    **budget: Any,
) -> dict[str, Any]:
    """Train one cell, or what is left of it: the best epoch's metrics, counts and gflops, and what it started from.

    budget: keep_rate or schedule; none for the dense model, whose entry is None. A run that is done returns at once.
    """
    from agglo.classification.training import recipe as recipes
    from agglo.classification.training.trainer import finetune

    chosen = dict(choices)
    if settings.batch_size is not None:
        chosen["batch_size"] = settings.batch_size
    if entry is None:
        chosen["method"] = "none"
    else:
        chosen |= {"method": entry.method, "method_options": dict(entry.options), **budget}
        chosen |= {} if entry.linkage is None else {"linkage": entry.linkage}
        chosen |= {} if entry.proportional is None else {"proportional": entry.proportional}
    how, _ = recipes.load(recipe).resolve(chosen)
    reached = reach(how.model, entry, **budget)
    best = finetune(how, data, folder, cpu=settings.on_cpu)
    start = RunFolder(folder).started_from()
    sources: dict[str, Any] = {"weights": start.get("weights"), "data_fingerprint": start.get("training images")}
    sources["batch_size"] = how.batch_size
    return {**{name: best[name] for name in ("top1", "top5", "mAP", "epoch") if name in best}, **reached, **sources}


def reach(model_name: str, entry: Entry | None, **budget: Any) -> dict[str, Any]:
    """Tokens after each block and GFLOPs of a cell; CannotRunError where a method cannot leave so few."""
    from agglo.schedule import as_schedule

    model = build(ModelSpec(model_name, pretrained=False))
    if isinstance(budget.get("schedule"), str):
        budget = {**budget, "schedule": as_schedule(budget["schedule"])}
    variant = Entry(DENSE, "atc").variant(1.0) if entry is None else entry.variant(**budget)
    try:
        variant.apply(model)
    except ValueError as error:
        raise CannotRunError(str(error)) from error
    found = reduction(model)
    assert found is not None
    return {"counts": found.counts, "gflops": found.gflops_after}


def fashion_subset(source: Path, target: Path, *, training: int = TRAINING_IMAGES, test: int = 10_000) -> Path:
    """The first images of both splits, as idx files of their own."""
    target.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", training), ("t10k", test)):
        for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
            path = target / f"{prefix}-{kind}-ubyte.gz"
            values = read_idx(find_idx(source, f"{prefix}-{kind}-ubyte"), dimensions)[:count]
            with replacing(path) as unfinished:  # several processes may write it, and read it, at once
                write_idx(unfinished, values)
    return target
