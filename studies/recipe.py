"""What `flops=` costs on several pretrained models, beside the paper's ATC and ToMe at the same FLOPs.

The recipe was chosen by the KL divergence to the dense answers on photos that are none of these images, so all images
judge it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from agglo import tuned as tuned_results
from agglo.budget import recipe_schedule, solve
from agglo.config import ReductionConfig
from agglo.lab.paper.classifiers import IMAGES, Backbone
from agglo.lab.paper.study import CannotRunError, Result, RunCell, Section, Settings, StudyCell
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings
from agglo.lab.tasks.classification.tuning import prepare
from agglo.patch import recipe
from agglo.schedule import Constant
from agglo.tuning.images import split
from agglo.tuning.result import Quality
from agglo.tuning.settings import TuneSettings
from agglo.tuning.subject import Subject
from agglo.utils.tables import CANNOT, Column, Table
from studies import study

MODELS = ("deit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k_ft_in1k")
LEVELS = (0.8, 0.65, 0.5, 0.35)
TUNED = {(MODELS[0], 0.5): "deit_tiny_patch16_224-half"}
_MOST_REMOVED = 32  # tokens at every block


class Way(NamedTuple):
    """A row of the table: how a model is reduced to a share of its FLOPs."""

    name: str
    config: Callable[[Subject, str, float], ReductionConfig]


def _stages(subject: Subject, model: str, level: float) -> ReductionConfig:
    return solve(lambda amount: ReductionConfig(keep_rate=round(amount, 4)), subject.share, level)


def _tome_as_recipe(subject: Subject, model: str, level: float) -> ReductionConfig:
    assert subject.depth is not None
    depth = subject.depth
    return solve(
        lambda amount: ReductionConfig("tome", schedule=recipe_schedule(depth, level, amount)), subject.share, level
    )


def _tome_own(subject: Subject, model: str, level: float) -> ReductionConfig:
    def config_of(amount: float) -> ReductionConfig:
        return ReductionConfig("tome", schedule=Constant(round(_MOST_REMOVED * (1 - amount))))

    return solve(config_of, subject.share, level)


def _tuned(subject: Subject, model: str, level: float) -> ReductionConfig:
    if (model, level) not in TUNED:
        raise ValueError("nothing was tuned for it")
    return tuned_results.config(TUNED[model, level])


WAYS = (
    Way("recipe", lambda subject, _, level: recipe(subject.model, flops=level)),
    Way("tuned for this model", _tuned),
    Way("ATC, the paper's stages", _stages),
    Way("ToMe, the recipe's schedule", _tome_as_recipe),
    Way("ToMe, the same number at every block", _tome_own),
)


def _backbone(model: str) -> Backbone:
    return Backbone(model, "imagenet", IMAGES["imagenet"], model)


def _axes(models: Sequence[str], settings: Settings) -> Iterator[StudyCell]:
    for model in models:
        for level in LEVELS:
            for way in WAYS:
                if way.config is not _tuned or (model, level) in TUNED:
                    yield StudyCell({"model": model, "flops": level, "method": way.name}, _backbone(model).needs)


def _run(models: Sequence[str], settings: Settings) -> RunCell:
    subjects: dict[str, tuple[Subject, Any]] = {}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        model = about["model"]
        if model not in subjects:
            backbone = _backbone(model)
            chosen = EvaluationSettings(backbone.spec(settings), backbone.root(settings), device=settings.device)
            opened, batches, output = prepare(chosen)
            images = split(batches, batch_size=chosen.batch_size)
            subjects.clear()
            subjects[model] = Subject(opened, images, TuneSettings(output=output)), images
        subject, images = subjects[model]
        every = [*images.search, *images.confirmation]
        try:
            config = next(way for way in WAYS if way.name == about["method"]).config(subject, model, about["flops"])
        except ValueError as error:
            raise CannotRunError(str(error)) from error
        return {
            "config": config.to_dict(),
            "share": subject.share(config),
            "counts": subject.cost(config).counts,
            "quality": asdict(subject.quality(config, every)),
            "dense": subject.accuracy(every),
            "images": sum(batch.images for batch in every),
        }

    return run


def _table(results: Sequence[Result], models: Sequence[str]) -> list[Section]:
    sections = []
    columns = [Column("method", left=True), *(Column(f"{level:g} of the FLOPs") for level in LEVELS)]
    for title, metric in (("Points of top-1 lost", _lost), ("KL divergence to the dense answers", _distance)):
        for model in models:
            here = {(r["method"], r["flops"]): r for r in results if r["model"] == model}
            rows = [[way.name, *(metric(here.get((way.name, level))) for level in LEVELS)] for way in WAYS]
            measured = [result for result in here.values() if "quality" in result]
            if measured:
                first = measured[0]
                about = f"Dense {first['dense']:.2f} %, {first['images']} images; +- one standard error, paired."
                sections.append(Section(f"{title}: {model}", Table(columns, rows), about))
    return sections


def _lost(result: Result | None) -> str | None:
    if result is None or "quality" not in result:
        return None if result is None else CANNOT
    drop = Quality(**result["quality"]).drop
    return drop and f"{drop.points:.2f} +- {drop.error:.2f}"


def _distance(result: Result | None) -> str | None:
    if result is None or "quality" not in result:
        return None if result is None else CANNOT
    found = Quality(**result["quality"])
    return f"{found.distance:.4f} +- {found.distance_error:.4f}"


ITEMS = (
    study(
        name="recipe",
        about="What flops= costs on several pretrained models, beside the paper's ATC and ToMe at the same FLOPs",
        full=MODELS,
        miniature=None,
        axes=_axes,
        run=_run,
        table=_table,
    ),
)
