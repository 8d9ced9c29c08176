"""Frechet distance of generated images to real ones over keep rates: the paper's table of Stable Diffusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.reproduce import printed
from agglo.reproduce.classifiers import FASHION, data_need
from agglo.reproduce.compare import Value, beside, grouped, over_seeds, percent, printed_value
from agglo.reproduce.estimates import Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.synthesis import (
    FULL,
    IMAGENET,
    INCEPTION,
    MINIATURE,
    PIPELINE,
    Scale,
    about_generator,
    image_cost,
    n_classes,
    open_generator,
    own_ways,
    paper_ways,
    pipeline_need,
    real_images,
    requests_of,
    workers_of,
)
from agglo.synthesis.evaluation.cells import DENSE
from agglo.synthesis.evaluation.features import features_named
from agglo.synthesis.evaluation.fid import features_of, statistics_of
from agglo.synthesis.evaluation.frechet import Statistics, frechet_distance
from agglo.synthesis.evaluation.grid import generate

CLASSIFIER = "classifier"
_WORDS = {CLASSIFIER: "the embedded classifier's features", INCEPTION: "Inception's features"}
_LOOK = {CLASSIFIER: Size(64, 12).multiply_adds(), INCEPTION: 5.7e9}  # multiply-adds of an image
# In miniature Inception, which takes longer than generating, looks at the images of these keep rates.
_INCEPTION_RATES = (None, 0.5, 0.4)


class DiffusionFid(Item):
    name = "diffusion-fid"
    shows = "table sd"
    about = (
        "FID of Stable Diffusion 1.5 over keep rates, by the paper's protocol: 2000 images (two per class of ImageNet, "
        "50 steps of PNDM, guidance 7.5) against the first five validation images per class; dense, ToMe, the paper's "
        "ATC with three linkages, and last, not in the paper, agglo's own mode"
    )
    miniature_about = (
        "The embedded generator and Fashion-MNIST stand in: three sets of 150 images against 1000 test images, by the "
        "embedded classifier's features and, where a file of it is found, by Inception's. ToMe draws its destinations, "
        "as tomesd does unless told otherwise."
    )

    def __init__(self, full: Scale = FULL, miniature: Scale = MINIATURE) -> None:
        self._scales = {False: full, True: miniature}

    def needs(self, miniature: bool) -> Sequence[Need]:
        inception = Need("weights", INCEPTION, "TorchScript of Inception-v3, inception-2015-12-05.pt")
        if miniature:
            return data_need(FASHION), inception
        return data_need(IMAGENET), pipeline_need(), inception

    def cells(self, settings: Settings) -> Sequence[Cell]:
        scale = self._scales[settings.miniature]
        images = n_classes(settings.miniature) * scale.per_class
        needs = (FASHION,) if settings.miniature else (IMAGENET, PIPELINE)
        found = []
        for method, rate in {**paper_ways(scale), **own_ways(scale)}:
            for kind in self._features(settings.miniature, rate):
                cost = images * _LOOK[kind]
                if kind == self._features(settings.miniature, rate)[0]:
                    cost += images * image_cost(settings, scale)
                for seed in range(settings.seeds or scale.sets):
                    about = {"method": method, "keep_rate": rate, "features": kind, "seed": seed}
                    found.append(Cell(about, (*needs, *([INCEPTION] if kind == INCEPTION else [])), cost))
        return found

    @staticmethod
    def _features(miniature: bool, rate: float | None) -> tuple[str, ...]:
        if not miniature:
            return (INCEPTION,)
        return (CLASSIFIER, INCEPTION) if rate in _INCEPTION_RATES else (CLASSIFIER,)

    def open(self, settings: Settings) -> RunCell:
        scale = self._scales[settings.miniature]
        ways = {**paper_ways(scale), **own_ways(scale)}
        generator = cache(lambda: open_generator(settings, scale))
        looking = cache(lambda kind: features_named(kind, weights=_weights(kind, settings), device=settings.device))
        folder = settings.run_folder(self.name)
        workers = workers_of(settings)

        @cache
        def reference(kind: str) -> Statistics:
            kept = folder / f"real{scale.reference}.{kind}.npz"
            if kept.exists():
                return Statistics.load(kept)
            real = real_images(settings, scale)
            found = Statistics.of(features_of(real, looking(kind), scale.reference, name="real images"))
            found.save(kept)
            return found

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            way, kind = ways[about["method"], about["keep_rate"]], about["features"]
            images = folder / f"set{about['seed']}"
            requests = requests_of(settings, scale, about["seed"])
            size = settings.batch_size or scale.batch_size
            made = generate(generator(), [way], requests, images, batch_size=size, workers=workers)
            if workers.index:
                return {}  # one process looks at the images
            source = images / way.name
            kept = source.with_name(f"{way.name}.{kind}.npz")
            found = Statistics.load(kept) if kept.exists() else statistics_of(source, lambda: looking(kind), keep=kept)
            counted = {"images": len(requests), "reference_images": scale.reference}
            seconds = {"seconds_per_image": made["cells"][way.name]["seconds_median"]}
            distance = {"distance": frechet_distance(reference(kind), found)}
            return {**distance, **counted, **seconds, "options": dict(way.options), **about_generator(generator())}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        return [part for kind in _WORDS for part in _sections(results, kind, settings.miniature)]

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        panels = []
        for kind, words in _WORDS.items():
            by_place = _by_place(results, kind)
            dense = by_place.get((DENSE, None))
            curves = [_curve(str(method), by_place) for method in dict.fromkeys(method for method, _ in by_place)]
            curves = [curve for curve in curves if len(curve.x) > 1]
            if dense and curves:
                level = Level(mean(result["distance"] for result in dense))
                ticks = sorted({x for curve in curves for x in curve.x})
                panels.append(CurvePanel(curves, "keep rate", "Frechet distance", level, f"by {words}", ticks))
        if not panels:
            return ()
        draw_curves(panels, folder / "distance.png", note="Bars: standard error over sets of seeds.")
        return [folder / "distance.png"]


def _weights(kind: str, settings: Settings) -> Path | None:
    return settings.weights[INCEPTION] if kind == INCEPTION else None


def _by_place(results: Sequence[Result], kind: str) -> dict[Any, list[Result]]:
    return grouped([result for result in results if result["features"] == kind], "method", "keep_rate")


def _curve(method: str, by_place: dict[Any, list[Result]]) -> Curve:
    rates = sorted(rate for name, rate in by_place if name == method and rate is not None)
    values = [over_seeds(by_place[method, rate], "distance") for rate in rates]
    done = [(rate, value) for rate, value in zip(rates, values, strict=True) if isinstance(value, Value)]
    errors = [value.error or 0.0 for _, value in done]
    paper = "paper" if method.endswith("-paper") else "own"
    name = method if method == "tome" else f"{method.removesuffix('-paper').replace('-', ' ')}, {paper}"
    return Curve(name, [rate for rate, _ in done], [value.number for _, value in done], errors)


def _sections(results: Sequence[Result], kind: str, miniature: bool) -> list[Section]:
    by_place = _by_place(results, kind)
    dense = by_place.get((DENSE, None), [])
    if not dense:
        return []
    rates = sorted({rate for _, rate in by_place} - {None}, reverse=True)
    methods = [str(method) for method in dict.fromkeys(method for method, _ in by_place) if method != DENSE]

    def measured(row: str, rate: float) -> Value | str | None:
        return over_seeds(dense if rate == 1.0 else by_place.get((row, rate), []), "distance")

    def expected(row: str, rate: float) -> Value | None:
        return printed_value(printed.value("diffusion", as_printed(row), rate))

    def above(row: str, rate: float) -> str | None:
        base = {result["seed"]: result["distance"] for result in dense}
        pairs = [result for result in by_place.get((row, rate), []) if result["seed"] in base]
        apart = [{**result, "distance": result["distance"] - base[result["seed"]]} for result in pairs]
        value = over_seeds(apart, "distance")
        return f"+{value}" if isinstance(value, Value) and value.number >= 0 else None if value is None else str(value)

    def table(rows: Sequence[str], tell: Callable[[str, float], Any], columns: Sequence[float], **how: Any) -> Any:
        return beside("method", rows, columns, tell, how.pop("printed", lambda row, rate: None), percent, **how)

    papers = [method for method in methods if method == "tome" or method.endswith("-paper")]
    own = [method for method in methods if method not in papers]
    first, sets = dense[0], len(dense)
    text = (
        f"By {_WORDS[kind]}: {sets} set{'s' if sets > 1 else ''} of {first['images']} images against "
        f"{first['reference_images']} real ones; in brackets the standard deviation over sets."
    )
    if miniature:
        text += " Printed numbers are of Stable Diffusion 1.5 and ImageNet: they cannot stand beside these."
    parts = [
        Section(
            f"Frechet distance by {kind}: the paper's table",
            table(papers, measured, [1.0, *rates], printed=expected, comparable=not miniature),
            text,
        )
    ]
    if own:
        title = f"Frechet distance by {kind}: agglo's own mode, not in the paper"
        parts.append(Section(title, table(own, measured, [1.0, *rates])))
    parts.append(Section(f"Difference to dense with the same seeds, by {kind}", table([*papers, *own], above, rates)))
    return parts


def as_printed(method: str) -> str:
    """The row of the paper's table; none for agglo's own mode.

    >>> as_printed("atc-average-paper"), as_printed("atc-average")
    ('atc average', 'atc-average')
    """
    return method.removesuffix("-paper").replace("-", " ") if method.endswith("-paper") else method


ITEMS = (DiffusionFid(),)
