"""What studies of classifiers share: methods, models with their data, evaluation and fine-tuning of one cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import find_idx, read_idx, write_idx
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.estimates import BASE, SMALL, TINY, TRAINING, Size
from agglo.lab.paper.study import CannotRunError, Need, Settings
from agglo.lab.training.run_folder import RunFolder
from agglo.models.opening import ModelSpec, build
from agglo.patch import apply, remove, report
from agglo.schedule import Schedule
from agglo.utils.files import replacing

RATES = (0.25, 0.5, 0.7, 0.9)
FASHION = "fashion-mnist"
DEITS = {"deit_tiny_patch16_224": TINY, "deit_small_patch16_224": SMALL, "deit_base_patch16_224": BASE}
# Images to train on and to validate with.
IMAGES = {
    "imagenet": (1_281_167, 50_000),
    "nabirds": (23_929, 24_633),
    "coco": (82_081, 40_137),
    "nuswide": (176_000, 44_000),
}
RECIPE = Path(__file__).parent / "items" / "miniature.toml"


@dataclass(frozen=True)
class Entry:
    """One line of the tables.

    Attributes:
        options: Of the method and of `ReductionConfig`, but for the budget, by name.
        learns: Whether nothing can be said about it off the shelf.
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    learns: bool = False

    @property
    def linkage(self) -> str | None:
        return self.options.get("linkage")

    def config(self, keep_rate: float | None = None, **how: Any) -> ReductionConfig:
        """Return the reduction at a budget: a keep rate, or a schedule."""
        return ReductionConfig.of(self.method, keep_rate=keep_rate, **{**self.options, **how})


LINKAGES = ("single", "average", "complete")
ATC = tuple(Entry(f"atc {linkage}", "atc", {"linkage": linkage}) for linkage in LINKAGES)
# Without proportional attention the released code does not track sizes at all.
RELEASED = tuple(
    Entry(f"atc {linkage} as released", "atc", {"linkage": linkage, "sizes": "ignored", "proportional": False})
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


@dataclass(frozen=True)
class Subject:
    """A classifier and the data set that it is measured on.

    Attributes:
        training, images: Images of its training and validation splits.
        weights: What its weights are called; empty for the embedded classifier.
        bundled: Whether the images are those that come with agglo.
        timm_name, options: How timm builds it, if not by the model's name alone.
        crop: As in an evaluation; None is the data set's protocol.
        image_size: Pixels, if not the model's own.
        ts: How many tokens are removed per block, where that is studied.
    """

    model: str
    size: Size
    data: str
    training: int
    images: int
    weights: str = ""
    bundled: bool = False
    timm_name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    crop: float | None = None
    image_size: int | None = None
    ts: tuple[int, ...] = ()

    @property
    def needs(self) -> tuple[Need, ...]:
        weights = [Need("weights", self.weights, f"the weights of {self.model}")] if self.weights else []
        return (*([] if self.bundled else [data_need(self.data)]), *weights)

    def spec(self, settings: Settings) -> ModelSpec:
        if not self.weights:
            return embedded_spec(self.image_size)
        name = self.timm_name or self.model
        return ModelSpec(name, settings.weights[self.weights], options=dict(self.options))

    def root(self, settings: Settings) -> Path:
        return embedded.IMAGES if self.bundled else settings.data[self.data]

    def training_root(self, settings: Settings, folder: Path) -> Path:
        """Return the folder of images to train on; of Fashion-MNIST it is a part, written to a folder."""
        if self.weights:
            return self.root(settings)
        return fashion_subset(self.root(settings), folder / "data", training=self.training, test=self.images)

    def start(self, settings: Settings) -> dict[str, Any]:
        """Return the choices of a training run that say what it starts from; the miniature's recipe has them."""
        return {"model": self.model, "checkpoint": str(settings.weights[self.weights])} if self.weights else {}


EMBEDDED = Subject(embedded.NAME, Size(64, 12), FASHION, 6000, 10_000)


def on_data(model: str, data: str) -> str:
    """Return what weights of a model are called that were trained on a data set: the published ones are ImageNet's."""
    return model if data == "imagenet" else f"{model}.{data}"


@dataclass(frozen=True)
class ClassifierScale:
    """What a study of classifiers goes by, in full or in miniature.

    Attributes:
        recipe, choices: Of a training run.
        evaluations: Passes over the validation split in one run; by the recipe `deit`, the weights and their moving
            average are evaluated after every epoch.
        seeds: Of training.
    """

    subjects: tuple[Subject, ...]
    entries: tuple[Entry, ...]
    rates: tuple[float, ...] = RATES
    recipe: str = "deit"
    epochs: int = 30
    evaluations: int = 60
    seeds: int = 1
    choices: Mapping[str, Any] = field(default_factory=dict)

    def subject(self, about: Mapping[str, Any]) -> Subject:
        """Return the model and data of a cell."""
        chosen = [s for s in self.subjects if s.model == about.get("model", s.model)]
        return next(s for s in chosen if s.data == about.get("data", s.data))

    def entry(self, about: Mapping[str, Any]) -> Entry | None:
        """Return the method of a cell; None is the dense model."""
        return None if about["method"] == DENSE else named(self.entries, about["method"])

    def training_cost(self, subject: Subject, schedule: Schedule | None) -> float:
        """Return the multiply-adds of one training run."""
        passes = TRAINING * self.epochs * subject.training + self.evaluations * subject.images
        return passes * subject.size.multiply_adds(schedule)


class Evaluator:
    """Evaluates one reduction of a model after the other; a model and its images stay open while they are asked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._open: tuple[Any, Any] | None = None

    def __call__(self, subject: Subject, config: ReductionConfig | None, *, root: Path | None = None) -> dict[str, Any]:
        """Return top1 and top5, or mAP; images, counts, gflops, and which weights and data these were.

        Args:
            subject: The model and its data. Of bundled images it has so many, evenly spread.
            config: The reduction; None is the dense model.
            root: Folder of the data, if not the subject's own.
        """
        from agglo.hosts.common.swap import UnsupportedModelError
        from agglo.lab.tasks.classification.evaluation.grid import Evaluation, EvaluationSettings

        if self._open is None or self._open[0] != subject:
            self._open = None  # what was open is let go before more is read
            chosen = EvaluationSettings(
                subject.spec(self.settings),
                root or subject.root(self.settings),
                {},
                dataset=subject.data,
                images=subject.images if subject.bundled else None,
                crop=subject.crop,
                batch_size=self.settings.batch_size or 64,
                workers=0 if self.settings.miniature else 2,  # small images are read faster than processes start
                device=self.settings.device,
            )
            self._open = (subject, Evaluation(chosen))
        evaluation = self._open[1]
        try:
            found = evaluation.one(config)
        except (ValueError, UnsupportedModelError) as error:
            raise CannotRunError(str(error)) from error
        finally:
            remove(evaluation.model)
        kept = ("top1", "top5", "mAP", "images", "images_per_second", "counts", "varies", "gflops")
        about: dict[str, Any] = {"config": None if config is None else config.to_dict(), "weights": evaluation.weights}
        about["data_fingerprint"] = evaluation.data.fingerprint()
        return {**{name: found[name] for name in kept if name in found}, **about}


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

    The budget is `keep_rate` or `schedule`, and nothing for the dense model, whose entry is None. A run that is done
    returns at once.
    """
    from agglo.lab.tasks.classification.training.settings import RECIPES
    from agglo.lab.tasks.classification.training.trainer import finetune

    chosen = dict(choices)
    if settings.batch_size is not None:
        chosen["batch_size"] = settings.batch_size
    if entry is None:
        chosen["method"] = "none"
    else:
        chosen |= {"method": entry.method, **training_choices(entry), **budget}
    how, _ = RECIPES.load(recipe).resolve(chosen)
    reached = reach(how.model, entry, **budget)
    best = finetune(how, data, folder, cpu=settings.on_cpu)
    start = RunFolder(folder).started_from()
    sources: dict[str, Any] = {"weights": start.get("weights"), "data_fingerprint": start.get("training images")}
    sources["batch_size"] = how.batch_size
    return {**{name: best[name] for name in ("top1", "top5", "mAP", "epoch") if name in best}, **reached, **sources}


def training_choices(entry: Entry) -> dict[str, Any]:
    """Return an entry's options as the settings of a training run have them."""
    own = {name: entry.options[name] for name in ("linkage", "proportional") if name in entry.options}
    return {**own, "method_options": {name: value for name, value in entry.options.items() if name not in own}}


def reach(model_name: str, entry: Entry | None, **budget: Any) -> dict[str, Any]:
    """Return tokens after each block and GFLOPs of a cell; CannotRunError where a method cannot leave so few."""
    model = build(ModelSpec(model_name, pretrained=False))
    try:
        apply(model, ReductionConfig(keep_rate=1.0) if entry is None else entry.config(**budget))
    except ValueError as error:
        raise CannotRunError(str(error)) from error
    found = report(model)
    assert found is not None
    return {"counts": found.counts, "gflops": found.gflops_after}


def fashion_subset(source: Path, target: Path, *, training: int, test: int) -> Path:
    """Write the first images of both splits as idx files of their own."""
    target.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", training), ("t10k", test)):
        for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
            path = target / f"{prefix}-{kind}-ubyte.gz"
            values = read_idx(find_idx(source, f"{prefix}-{kind}-ubyte"), dimensions)[:count]
            with replacing(path) as unfinished:  # several processes may write it, and read it, at once
                write_idx(unfinished, values)
    return target
