"""Frechet distance of generated images to real ones over keep rates: the paper's table of Stable Diffusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from agglo.drawing.charts import CurvePanel, Level, draw_curves
from agglo.lab.paper import printed
from agglo.lab.paper.compare import (
    DENSE,
    Value,
    beside,
    by_method,
    curve_of,
    grouped,
    over_seeds,
    printed_value,
    ticks_of,
)
from agglo.lab.paper.estimates import Size
from agglo.lab.paper.study import Cell, Need, Result, RunCell, Section, Settings, Study
from agglo.lab.paper.synthesis import (
    FULL,
    INCEPTION,
    MINIATURE,
    GeneratorScale,
    about_generator,
    all_ways,
    config_of,
    open_generator,
    real_images,
    workers_of,
)
from agglo.lab.tasks.synthesis.evaluation.features import features_named
from agglo.lab.tasks.synthesis.evaluation.fid import Statistics, features_of, frechet_distance, statistics_of
from agglo.lab.tasks.synthesis.evaluation.grid import generate

CLASSIFIER = "classifier"
_WORDS = {CLASSIFIER: "the embedded classifier's features", INCEPTION: "Inception's features"}
_LOOK = {CLASSIFIER: Size(64, 12).multiply_adds(), INCEPTION: 5.7e9}  # multiply-adds of an image
# In miniature Inception, which takes longer than generating, looks at the images of these keep rates.
_INCEPTION_RATES = (None, 0.5, 0.4)


def _axes(scale: GeneratorScale, settings: Settings) -> Iterator[Cell]:
    images = len(scale.requests(0))
    inception = Need("weights", INCEPTION, "TorchScript of Inception-v3, inception-2015-12-05.pt")
    for method, rate in all_ways(scale):
        kinds = [CLASSIFIER] if scale.embedded else [INCEPTION]
        if scale.embedded and rate in _INCEPTION_RATES:
            kinds.append(INCEPTION)
        for kind in kinds:
            cost = images * (_LOOK[kind] + (scale.image_cost if kind == kinds[0] else 0))
            needs = (*scale.data_needs, *scale.generator_needs, *([inception] if kind == INCEPTION else []))
            for seed in range(settings.seeds or scale.sets):
                yield Cell({"method": method, "keep_rate": rate, "features": kind, "seed": seed}, needs, cost)


def _run(scale: GeneratorScale, settings: Settings) -> RunCell:
    ways, workers, folder = all_ways(scale), workers_of(settings), settings.run_folder("diffusion-fid")
    generator = cache(lambda: open_generator(settings, scale))

    @cache
    def looking(kind: str) -> Any:
        weights = settings.weights[INCEPTION] if kind == INCEPTION else None
        return features_named(kind, weights=weights, device=settings.device)

    @cache
    def reference(kind: str) -> Statistics:
        kept = folder / f"real{scale.reference}.{kind}.npz"
        if kept.exists():
            return Statistics.load(kept)
        real = real_images(settings, scale)
        found = Statistics.of(features_of(real, looking(kind), scale.reference, name="real images"))
        found.save(kept)
        return found

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        way, kind = ways[about["method"], about["keep_rate"]], about["features"]
        images, requests = folder / f"set{about['seed']}", scale.requests(about["seed"])
        size = settings.batch_size or scale.batch_size
        made = generate(generator(), [way], requests, images, batch_size=size, workers=workers)
        if workers.index:
            return {}  # one process looks at the images
        kept = images / f"{way.name}.{kind}.npz"
        if kept.exists():
            found = Statistics.load(kept)
        else:
            found = statistics_of(images / way.name, lambda: looking(kind), keep=kept)
        counted = {"images": len(requests), "reference_images": scale.reference}
        seconds = {"seconds_per_image": made[way.name]["seconds_median"]}
        distance = {"distance": frechet_distance(reference(kind), found)}
        return {**distance, **counted, **seconds, **config_of(way), **about_generator(generator())}

    return run


def _table(results: Sequence[Result], scale: GeneratorScale) -> list[Section]:
    return [
        section
        for kind in _WORDS
        for section in _sections([r for r in results if r["features"] == kind], kind, comparable=not scale.embedded)
    ]


def _sections(results: Sequence[Result], kind: str, *, comparable: bool) -> list[Section]:
    dense = [result for result in results if result["method"] == DENSE]
    if not dense:
        return []
    methods, rates, reduced = by_method(results, "keep_rate", "distance")
    groups = grouped(results, "method", "keep_rate")
    base = {result["seed"]: result["distance"] for result in dense}

    def measured(row: str, rate: float) -> Value | str | None:
        return over_seeds(dense, "distance") if rate == 1.0 else reduced(row, rate)

    def expected(row: str, rate: float) -> Value | None:
        return printed_value(printed.value("diffusion", as_printed(row), rate))

    def above(row: str, rate: float) -> str | None:
        pairs = [result for result in groups.get((row, rate), []) if result["seed"] in base]
        apart = [{**result, "distance": result["distance"] - base[result["seed"]]} for result in pairs]
        value = over_seeds(apart, "distance")
        return f"+{value}" if isinstance(value, Value) and value.number >= 0 else None if value is None else str(value)

    papers = [method for method in methods if method == "tome" or method.endswith("-paper")]
    own = [method for method in methods if method not in papers]
    first, sets = dense[0], len(dense)
    text = (
        f"By {_WORDS[kind]}: {sets} set{'s' if sets > 1 else ''} of {first['images']} images against "
        f"{first['reference_images']} real ones; in brackets the standard deviation over sets."
    )
    if not comparable:
        text += " Printed numbers are of Stable Diffusion 1.5 and ImageNet: they cannot stand beside these."
    table = beside(papers, [1.0, *rates], measured, expected, comparable=comparable)
    parts = [Section(f"Frechet distance by {kind}: the paper's table", table, text)]
    if own:
        title = f"Frechet distance by {kind}: agglo's own mode, not in the paper"
        parts.append(Section(title, beside(own, [1.0, *rates], measured)))
    table = beside([*papers, *own], rates, above)
    return [*parts, Section(f"Difference to dense with the same seeds, by {kind}", table)]


def as_printed(method: str) -> str:
    """Return the row of the paper's table; none for agglo's own mode.

    >>> as_printed("atc-average-paper"), as_printed("atc-average")
    ('atc average', 'atc-average')
    """
    return method.removesuffix("-paper").replace("-", " ") if method.endswith("-paper") else method


def _draw(results: Sequence[Result], scale: GeneratorScale, settings: Settings, folder: Path) -> list[Path]:
    panels = []
    for kind, words in _WORDS.items():
        by_name = grouped([result for result in results if result["features"] == kind], "method")
        curves = [curve_of(_title(name), of, "keep_rate", "distance") for (name,), of in by_name.items()]
        curves = [curve for curve in curves if len(curve.x) > 1]
        if (dense := by_name.get((DENSE,))) and curves:
            level = Level(mean(result["distance"] for result in dense))
            panels.append(CurvePanel(curves, "keep rate", "Frechet distance", level, f"by {words}", ticks_of(curves)))
    if not panels:
        return []
    draw_curves(panels, folder / "distance.png", note="Bars: standard error over sets of seeds.")
    return [folder / "distance.png"]


def _title(method: str) -> str:
    paper = "paper" if method.endswith("-paper") else "own"
    return method if method == "tome" else f"{method.removesuffix('-paper').replace('-', ' ')}, {paper}"


DIFFUSION_FID = Study(
    name="diffusion-fid",
    shows="table sd",
    about="FID of Stable Diffusion 1.5 over keep rates, by the paper's protocol: 2000 images (two per class of "
    "ImageNet, 50 steps of PNDM, guidance 7.5) against the first five validation images per class; dense, ToMe, the "
    "paper's ATC with three linkages, and last, not in the paper, agglo's own mode",
    stands_in="The embedded generator and Fashion-MNIST stand in: three sets of 150 images against 1000 test images, "
    "by the embedded classifier's features and, where a file of it is found, by Inception's. ToMe draws its "
    "destinations, as tomesd does unless told otherwise.",
    full=FULL,
    miniature=MINIATURE,
    axes=_axes,
    run=_run,
    table=_table,
    draw=_draw,
)
ITEMS = (DIFFUSION_FID,)
