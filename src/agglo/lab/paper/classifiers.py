"""What studies of classifiers share: methods, models with their data, evaluation and fine-tuning of one cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from agglo.config import ReductionConfig
from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import find_idx, read_idx, write_idx
from agglo.lab.paper.study import CannotRunError, Need, Settings
from agglo.lab.training.loop import started_from
from agglo.methods.registry import find
from agglo.models.opening import ModelSpec, build
from agglo.patch import apply, remove, report
from agglo.utils.files import replacing

SHELF, TUNED = "off the shelf", "fine-tuned"
RATES = (0.25, 0.5, 0.7, 0.9)
FASHION = "fashion-mnist"
DEITS = ("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224")
IMAGES = {"imagenet": 50_000, "nabirds": 24_633, "coco": 40_137, "nuswide": 44_000}  # of the validation splits
RECIPE = str(Path(__file__).parent / "items" / "miniature.toml")
_DATA = {
    "imagenet": "ImageNet-1K, val/ and for training train/",
    "nabirds": "NABirds",
    "coco": "COCO 2014 with its annotations",
    "nuswide": "NUS-WIDE with nus_wid_data.csv",
    FASHION: "Fashion-MNIST's four idx files",
}


@dataclass(frozen=True)
class Entry:
    """One line of the tables: a method, with its own options and those of `ReductionConfig` but for the budget."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def learns(self) -> bool:
        """Whether nothing can be said about it off the shelf."""
        return issubclass(find(self.method), nn.Module) and self.options.get("weights") != "equal"

    def config(self, keep_rate: float | None = None, **how: Any) -> ReductionConfig:
        """Return the reduction at a budget: a keep rate, or a schedule."""
        return ReductionConfig.of(self.method, keep_rate=keep_rate, **{**self.options, **how})


def plain(*names: str) -> tuple[Entry, ...]:
    """Return entries of methods as they are."""
    return tuple(Entry(name, name) for name in names)


LINKAGES = ("single", "average", "complete")
ATC = tuple(Entry(f"atc {linkage}", "atc", {"linkage": linkage}) for linkage in LINKAGES)
# Methods of other authors that merge hard, and softly, as the paper counts them.
HARD = ("kmedoids", "dpc_knn", "tome")
SOFT = ("sit", "patch_merger", "sinkhorn")
OURS = tuple(entry.name for entry in ATC)
PAPER = (*plain("l1", "l2", "linf", "topk", "evit", "dynamicvit", "ats", "tome", "kmedoids", "dpc_knn", *SOFT), *ATC)
EQUAL = Entry("dpc_knn equal", "dpc_knn", {"weights": "equal"})
# Methods that came after the paper.
NEWER = plain("pitome", "tofu", "mctf", "mutual", "diffrate", "diffrate_learned", "dtem", "dct")
# Methods that the paper has in detection only, or not at all.
FURTHER = (Entry("random", "random", {"seed": 0}), *plain("dynamicvit_prsv", "svit", "evovit", "pool"), EQUAL, *NEWER)
ALL = (*PAPER, *FURTHER)


def named(entries: Sequence[Entry], name: str) -> Entry | None:
    """Return the entry of a name; None for the dense model and for what is not there."""
    return next((entry for entry in entries if entry.name == name), None)


def data_need(name: str) -> Need:
    return Need("data", name, _DATA[name])


@dataclass(frozen=True)
class Backbone:
    """A classifier and the data set that it is measured on."""

    model: str
    data: str
    images: int  # of its validation split
    weights: str = ""  # what they are called; empty for the embedded classifier
    training: int = 0  # images of Fashion-MNIST to train on; 0 is all images of the data set
    bundled: bool = False  # whether the images are those that come with agglo
    timm_name: str = ""  # how timm builds it, if not by the model's name alone
    options: Mapping[str, Any] = field(default_factory=dict)
    crop: float | None = None  # as in an evaluation; None is the data set's protocol
    image_size: int | None = None  # pixels, if not the model's own
    patches: int = 196  # tokens of an image without its class token
    depth: int = 12  # blocks
    ts: tuple[int, ...] = ()  # numbers of tokens removed per block, where that is studied

    @property
    def needs(self) -> tuple[Need, ...]:
        weights = [Need("weights", self.weights, f"the weights of {self.model}")] if self.weights else []
        return (*([] if self.bundled else [data_need(self.data)]), *weights)

    def spec(self, settings: Settings) -> ModelSpec:
        size = None if self.image_size is None else (self.image_size, self.image_size)
        if not self.weights:
            return ModelSpec(embedded.NAME, pretrained=True, image_size=size)
        name, weights = self.timm_name or self.model, settings.weights[self.weights]
        return ModelSpec(name, weights, image_size=size, options=dict(self.options))

    def root(self, settings: Settings) -> Path:
        return embedded.IMAGES if self.bundled else settings.data[self.data]

    def training_root(self, settings: Settings, folder: Path) -> Path:
        """Return the folder of images to train on; of Fashion-MNIST it is a part, written to a folder."""
        root, part = self.root(settings), folder / "data"
        if not self.training:
            return root
        part.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", self.training), ("t10k", self.images)):
            for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
                values = read_idx(find_idx(root, f"{split}-{kind}-ubyte"), dimensions)[:count]
                # Several processes may write it, and read it, at once.
                with replacing(part / f"{split}-{kind}-ubyte.gz") as unfinished:
                    write_idx(unfinished, values)
        return part


EMBEDDED = Backbone(embedded.NAME, FASHION, 10_000, training=6000)


def weights_name(model: str, data: str) -> str:
    """Return what weights of a model are called that were trained on a data set: the published ones are ImageNet's."""
    return model if data == "imagenet" else f"{model}.{data}"


@dataclass(frozen=True)
class ClassifierScale:
    """Models, methods and keep rates of a study of classifiers, and the recipe and choices of its training runs."""

    subjects: tuple[Backbone, ...]
    entries: tuple[Entry, ...]
    rates: tuple[float, ...] = RATES
    recipe: str = "deit"
    seeds: int = 1
    choices: Mapping[str, Any] = field(default_factory=dict)

    def subject(self, about: Mapping[str, Any]) -> Backbone:
        """Return the model and data of a cell."""
        chosen = [s for s in self.subjects if s.model == about.get("model", s.model)]
        return next(s for s in chosen if s.data == about.get("data", s.data))


class Evaluator:
    """Evaluates one reduction of a model after the other; a model and its images stay open while they are asked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._open: tuple[Backbone | None, Any] = (None, None)

    def __call__(self, subject: Backbone, config: ReductionConfig | None, root: Path | None = None) -> dict[str, Any]:
        """Return top1 and top5, or mAP; images, counts, gflops, and which weights and data these were.

        `root` is the folder of the data, if not the subject's own. Of bundled images so many are taken, evenly spread.
        """
        from agglo.hosts.common.swap import UnsupportedModelError
        from agglo.lab.tasks.classification.evaluation.grid import Evaluation, EvaluationSettings

        if self._open[0] != subject:
            self._open = (None, None)  # what was open is let go before more is read
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


class FineTuner:
    """Trains one cell of a study after the other, each in a folder named after it."""

    def __init__(self, item: str, scale: ClassifierScale, settings: Settings) -> None:
        self.scale, self.settings, self.folder = scale, settings, settings.run_folder(item)
        here = [s for s in scale.subjects if s.data in settings.data]
        self.roots = {s.data: s.training_root(settings, self.folder) for s in here}

    def __call__(
        self, about: Mapping[str, Any], budget: Mapping[str, Any], *, weights: str | None = None, **choices: Any
    ) -> dict[str, Any]:
        """Return a cell's best metrics, counts and gflops, and what it started from; a run that is done is read.

        `budget` is `keep_rate` or `schedule`, `choices` are settings beyond those of the scale. The training starts
        from the subject's own weights, unless others are named.
        """
        from agglo.lab.tasks.classification.training.settings import RECIPES
        from agglo.lab.tasks.classification.training.trainer import finetune

        subject, entry = self.scale.subject(about), named(self.scale.entries, about["method"])
        chosen = {**self.scale.choices, "seed": about["seed"], "dataset": subject.data, **choices}
        if weights := weights or subject.weights:
            chosen |= {"model": subject.model, "checkpoint": str(self.settings.weights[weights])}
        chosen |= training_choices(entry)
        if entry is not None:
            chosen |= budget
        if self.settings.batch_size is not None:
            chosen["batch_size"] = self.settings.batch_size
        how, _ = RECIPES.load(self.scale.recipe).resolve(chosen)
        model = build(ModelSpec(how.model, pretrained=False))
        try:
            apply(model, ReductionConfig(keep_rate=1.0) if entry is None else entry.config(**budget))
        except ValueError as error:
            raise CannotRunError(str(error)) from error
        reached = report(model)
        assert reached is not None
        folder = self.folder / "_".join(str(value).replace(" ", "-") for value in about.values())
        best = finetune(how, self.roots[subject.data], folder, cpu=self.settings.device == "cpu")
        start = started_from(folder)
        return {
            **{name: best[name] for name in ("top1", "top5", "mAP", "epoch") if name in best},
            "counts": reached.counts,
            "gflops": reached.gflops_after,
            "weights": start.get("weights"),
            "data_fingerprint": start.get("training images"),
            "batch_size": how.batch_size,
            "images": subject.images,
        }


def training_choices(entry: Entry | None) -> dict[str, Any]:
    """Return an entry's method and options as the settings of a training run have them."""
    if entry is None:
        return {"method": "none"}
    own = {name: entry.options[name] for name in ("linkage", "proportional") if name in entry.options}
    options = {name: value for name, value in entry.options.items() if name not in own}
    return {"method": entry.method, **own, "method_options": options}
