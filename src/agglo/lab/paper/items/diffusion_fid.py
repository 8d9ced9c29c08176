"""Frechet distance of generated images to real ones over keep rates: the paper's table of Stable Diffusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from agglo.lab.paper import compare, synthesis
from agglo.lab.paper.compare import DENSE, Value
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, Study, StudyCell
from agglo.lab.paper.synthesis import FULL, INCEPTION, MINIATURE, GeneratorScale
from agglo.lab.tasks.synthesis.evaluation.features import features_named
from agglo.lab.tasks.synthesis.evaluation.fid import Statistics, features_of, frechet_distance, statistics_of
from agglo.lab.tasks.synthesis.evaluation.grid import generate

CLASSIFIER = "classifier"
_FEATURES = {CLASSIFIER: "the embedded classifier's features", INCEPTION: "Inception's features"}
# In miniature Inception, which takes longer than generating, looks at the images of these keep rates.
_INCEPTION_RATES = (None, 0.5, 0.4)


def _axes(scale: GeneratorScale, settings: Settings) -> Iterator[StudyCell]:
    inception = Need("weights", INCEPTION, "TorchScript of Inception-v3, inception-2015-12-05.pt")
    for method, rate in scale.reductions:
        for kind in _FEATURES if scale.embedded else [INCEPTION]:
            if scale.embedded and kind == INCEPTION and rate not in _INCEPTION_RATES:
                continue
            needs = (*scale.data_needs, *scale.generator_needs, *([inception] if kind == INCEPTION else []))
            for seed in range(settings.seeds or scale.sets):
                yield StudyCell({"method": method, "keep_rate": rate, "features": kind, "seed": seed}, needs)


def _run(scale: GeneratorScale, settings: Settings) -> RunCell:
    workers, folder = synthesis.workers_of(settings), settings.run_folder("diffusion-fid")
    generator = cache(lambda: synthesis.open_generator(settings, scale))

    @cache
    def features(kind: str) -> Any:
        weights = settings.weights[INCEPTION] if kind == INCEPTION else None
        return features_named(kind, weights=weights, device=settings.device)

    @cache
    def reference(kind: str) -> Statistics:
        kept = folder / f"real{scale.reference}.{kind}.npz"
        if kept.exists():
            return Statistics.load(kept)
        real = synthesis.real_images(settings, scale)
        found = Statistics.of(features_of(real, features(kind), scale.reference, name="real images"))
        found.save(kept)
        return found

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell, kind = scale.reductions[about["method"], about["keep_rate"]], about["features"]
        images, requests = folder / f"set{about['seed']}", scale.requests(about["seed"])
        size = settings.batch_size or scale.batch_size
        made = generate(generator(), [cell], requests, images, batch_size=size, workers=workers)
        if workers.index:
            return {}  # one process looks at the images
        kept = images / f"{cell.name}.{kind}.npz"
        found = Statistics.load(kept) if kept.exists() else None
        found = found or statistics_of(images / cell.name, lambda: features(kind), keep=kept)
        return {
            "distance": frechet_distance(reference(kind), found),
            "images": len(requests),
            "reference_images": scale.reference,
            "seconds_per_image": made[cell.name]["seconds_median"],
            **synthesis.sources(generator(), cell),
        }

    return run


def _table(results: Sequence[Result], scale: GeneratorScale) -> list[Section]:
    found = []
    for kind in _FEATURES:
        here = [result for result in results if result["features"] == kind]
        if any(result["method"] == DENSE for result in here):
            found += _sections(here, kind, comparable=not scale.embedded)
    return found


def _sections(results: Sequence[Result], kind: str, *, comparable: bool) -> list[Section]:
    dense = [result for result in results if result["method"] == DENSE]
    found = compare.by_method(results, "keep_rate", "distance", comparable=comparable)
    base = {result["seed"]: result["distance"] for result in dense}
    apart = [{**r, "distance": r["distance"] - base[r["seed"]]} for r in results if r["seed"] in base]

    def measured(row: str, rate: float) -> Value | str | None:
        return compare.over_seeds(dense, "distance") if rate == 1.0 else found.measured(row, rate)

    def expected(row: str, rate: float) -> Value | None:
        return compare.printed_value("diffusion", printed_name(row), rate)

    every = replace(found, columns=[1.0, *found.columns], measured=measured)
    papers = [method for method in found.rows if method == "tome" or method.endswith("-paper")]
    own = [method for method in found.rows if method not in papers]
    text = (
        f"By {_FEATURES[kind]}: {len(dense)} set{'s' if len(dense) > 1 else ''} of {dense[0]['images']} images against "
        f"{dense[0]['reference_images']} real ones; in brackets the standard deviation over sets."
    )
    if not comparable:
        text += " Printed numbers are of Stable Diffusion 1.5 and ImageNet: they cannot stand beside these."
    table = replace(every, rows=papers, expected=expected).table()
    parts = [Section(f"Frechet distance by {kind}: the paper's table", table, text)]
    if own:
        title = f"Frechet distance by {kind}: agglo's own mode, not in the paper"
        parts.append(Section(title, replace(every, rows=own).table()))
    table = replace(compare.by_method(apart, "keep_rate", "distance"), rows=[*papers, *own]).table()
    return [*parts, Section(f"Difference to dense with the same seeds, by {kind}", table)]


def printed_name(method: str) -> str:
    """Return the row of the paper's table; none for agglo's own mode.

    >>> printed_name("atc-average-paper"), printed_name("atc-average")
    ('atc average', 'atc-average')
    """
    return method.removesuffix("-paper").replace("-", " ") if method.endswith("-paper") else method


def _draw(results: Sequence[Result], scale: GeneratorScale, settings: Settings, folder: Path) -> list[Path]:
    panels = []
    for kind, title in _FEATURES.items():
        here = [result for result in results if result["features"] == kind]
        panels += compare.panel(here, "distance", f"by {title}", x_label="keep rate", y_label="Frechet distance")
    return compare.draw_panels(panels, folder / "distance.png", "bars: standard error over sets of seeds")


DIFFUSION_FID = Study(
    name="diffusion-fid",
    shows="table sd",
    about="FID of Stable Diffusion 1.5 over keep rates, by the paper's protocol: 2000 images (two per class of "
    "ImageNet, 50 steps of PNDM, guidance 7.5) against the first five validation images per class; dense, ToMe, the "
    "paper's ATC with three linkages, and last, not in the paper, agglo's own mode",
    stands_in="The embedded generator and Fashion-MNIST stand in: three sets of 150 images against 1000 test images, "
    "by the embedded classifier's features and, where a file of it is found, by Inception's. ToMe draws its "
    "destinations, as tomesd does unless told otherwise.",
    gpu_hours="81",
    full=FULL,
    miniature=MINIATURE,
    axes=_axes,
    run=_run,
    table=_table,
    draw=_draw,
)
ITEMS = (DIFFUSION_FID,)
