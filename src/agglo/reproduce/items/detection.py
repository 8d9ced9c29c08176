"""AP of detectors with fewer tokens, off the shelf and fine-tuned: the paper's two tables of COCO."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agglo.reproduce.classifiers import FASHION, data_need
from agglo.reproduce.detection_claims import Claim, Term, claims_of, difference, lost, passes
from agglo.reproduce.detection_tables import draw_ap, tables
from agglo.reproduce.detectors import (
    ASKING,
    COCO,
    COLLAPSED,
    DENSE,
    DENSE_WITH_TOKEN,
    FULL,
    GATE,
    MINIATURE,
    SHELF,
    TUNED,
    Judge,
    Scale,
    is_kept,
    published,
    start,
)
from agglo.reproduce.estimates import TRAINING, Size
from agglo.reproduce.item import CannotRunError, Cell, Item, Need, Result, RunCell, Section, Settings, key_of
from agglo.reproduce.record import read_results
from agglo.schedule import Stages

# Images of 800 x 1333 pixels have about 4200 patches; the neck and the heads cost as much for any backbone.
_SIZES = {"tiny": Size(192, 12, 4200), "small": Size(384, 12, 4200), "miniature": Size(64, 12)}
_HEADS = {COCO: 2e11, FASHION: 3e8}
_TRAINING_IMAGES = {COCO: 117_266, FASHION: 4000}
_VALIDATION_IMAGES = 5000
_RESAMPLING = 1e9  # no pass of a model, but some seconds
_EPOCHS = {"dense": 36, "tiny": 6, "small": 4, "miniature": 1}


class Detection(Item):
    name = "detection"
    shows = "tables objdetseg, objdetsegFull"
    about = (
        "Box and mask AP on COCO 2017 of Mask R-CNN on ViT-Adapter T and S with tokens reduced at blocks 3, 6 and 9, "
        "off the shelf and fine-tuned from the dense detector: ATC with three linkages, ToMe, SViT, Evo-ViT, "
        "DynamicViT with and without preserved tokens, EViT and ATS. EViT, ATS and Evo-ViT ask a class token, which "
        "the published detectors do not have: they get a dense detector of their own"
    )
    miniature_about = (
        "A small detector of garments in scenes made from Fashion-MNIST stands in, trained with a class token, so that "
        "one detector serves all methods; pooling, random dropping, K-Medoids, DPC-KNN and Top-K come beside. Off the "
        "shelf by two seeds of training, fine-tuned at 50 % by one."
    )

    def __init__(self, full: Scale = FULL, miniature: Scale = MINIATURE) -> None:
        self._scales = {False: full, True: miniature}

    def needs(self, miniature: bool) -> Sequence[Need]:
        if miniature:
            return (data_need(FASHION),)
        given = [
            Need("weights", published(model), f"the dense detector {model}, in place of training it")
            for model in self._scales[False].models
        ]
        starts = [Need("weights", start(model), f"DeiT {model}") for model in self._scales[False].models]
        return [Need("data", COCO, "COCO 2017: train2017, val2017, annotations"), *given, *starts]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        scale = self._scales[settings.miniature]
        return [cell for model in scale.models for cell in self._of_model(settings, scale, model)]

    def _of_model(self, settings: Settings, scale: Scale, model: str) -> list[Cell]:
        seeds = seeds_of(settings, scale)

        def cell(training: str, seed: int, name: str, rate: float | None = None) -> Cell:
            about = {"model": model, "training": training, "method": name, "keep_rate": rate, "seed": seed}
            return Cell(about, _needs(settings, scale, model, [name]), _cost(settings, scale, model, about))

        dense = [DENSE]
        if any(scale.dense_name(entry) == DENSE_WITH_TOKEN for entry in scale.methods):
            dense.append(DENSE_WITH_TOKEN)
        found = [cell(SHELF, seed, name) for seed in range(seeds[SHELF]) for name in dense]
        if scale.gate:
            found += [cell(GATE, seed, COLLAPSED.name) for seed in range(seeds[SHELF])]
        for rate in scale.shelf_rates:
            found += [cell(SHELF, seed, entry.name, rate) for seed in range(seeds[SHELF]) for entry in scale.shelf]
        if scale.tuned_dense:
            found += [cell(TUNED, seed, DENSE) for seed in range(seeds[TUNED])]
        for rate in scale.tuned_rates:
            found += [cell(TUNED, seed, entry.name, rate) for seed in range(seeds[TUNED]) for entry in scale.fine_tuned]
        for claim in claims_of(scale):
            compared = min(seeds[term.training] for term in claim.terms)
            about = {"model": model, "difference": claim.words, "seeds": list(range(compared))}
            needs = _needs(settings, scale, model, [term.method for term in claim.terms])
            found.append(Cell(about, needs, _RESAMPLING))
        return found

    def open(self, settings: Settings) -> RunCell:
        scale = self._scales[settings.miniature]
        judge = Judge(settings, scale, self.name)
        claims = {claim.words: claim for claim in claims_of(scale)}

        def found_so_far() -> dict[str, Result]:
            return {key_of(result["cell"]): result for result in read_results(settings.folder(self.name))}

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            if "difference" in about:
                return _compare(judge, claims[about["difference"]], about, found_so_far())
            if about["training"] == GATE:
                return _collapse(judge, about, found_so_far())
            if scale.gate and about["method"] != DENSE:
                _require_gate(about["model"], found_so_far().values())
            return judge(about)

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        return tables(self._planned(results, settings), self._scales[settings.miniature], settings.miniature)

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        return draw_ap(self._planned(results, settings), folder / "ap.png")

    def _planned(self, results: Sequence[Result], settings: Settings) -> list[Result]:
        """A record may hold more than was asked for: cells of seeds that are not finished."""
        keys = {cell.key for cell in self.cells(settings)}
        return [result for result in results if key_of(result["cell"]) in keys]


def seeds_of(settings: Settings, scale: Scale) -> dict[str, int]:
    return {SHELF: settings.seeds or scale.shelf_seeds, TUNED: settings.seeds or scale.tuned_seeds}


def _needs(settings: Settings, scale: Scale, model: str, methods: Sequence[str]) -> tuple[str, ...]:
    """Data, and a dense detector or what one is trained from."""
    if settings.miniature:
        return (scale.data,)
    asking = {entry.name for entry in scale.methods if entry.method in ASKING} | {DENSE_WITH_TOKEN}
    trained = any(method in asking for method in methods) or published(model) not in settings.weights
    given = any(method not in asking for method in methods) and published(model) in settings.weights
    return (scale.data, *([start(model)] if trained else []), *([published(model)] if given else []))


def _cost(settings: Settings, scale: Scale, model: str, about: Mapping[str, Any]) -> float:
    """Of judging, and of the training that comes before."""
    rate, size, heads = about["keep_rate"], _SIZES[model], _HEADS[scale.data]
    one = heads + size.multiply_adds(None if rate is None else Stages(rate))
    total = one * (scale.validation or _VALIDATION_IMAGES)
    if about["training"] == TUNED:
        images = scale.tuned[1].get("scenes", _TRAINING_IMAGES[scale.data])
        return total + TRAINING * _EPOCHS[model] * images * one
    if about["method"] == DENSE_WITH_TOKEN or (about["method"] == DENSE and published(model) not in settings.weights):
        epochs = scale.dense[1].get("epochs", _EPOCHS["dense"])
        total += TRAINING * epochs * scale.dense[1].get("scenes", _TRAINING_IMAGES[scale.data]) * one
    return total


def _compare(judge: Judge, claim: Claim, about: Mapping[str, Any], done: Mapping[str, Result]) -> dict[str, Any]:
    """CannotRunError where one of the cells could not be run."""

    def place(term: Term, seed: int) -> dict[str, Any]:
        where = {"model": about["model"], "training": term.training, "method": term.method}
        return {**where, "keep_rate": term.keep_rate, "seed": seed}

    def result(term: Term, seed: int) -> Result:
        return done[key_of(place(term, seed))]

    for term in claim.terms:
        for seed in about["seeds"]:
            if "cannot" in result(term, seed):
                raise CannotRunError(result(term, seed)["cannot"])
    for term in claim.terms:
        for seed in about["seeds"]:
            if not is_kept(judge.folder(place(term, seed))):
                print(f"agglo: the match tables of {place(term, seed)} are gone; judged again", file=sys.stderr)
                judge(place(term, seed))
    if not judge.is_main:
        return {}
    return difference(claim, about["seeds"], result, lambda term, seed: judge.samples(place(term, seed)))


def _collapse(judge: Judge, about: Mapping[str, Any], done: Mapping[str, Result]) -> dict[str, Any]:
    """A single token, and what it costs."""
    dense = {**about, "training": SHELF, "method": DENSE}
    if not is_kept(judge.folder(dense)):
        judge(dense)
    found = judge(about)
    if judge.is_main:
        found["lost"] = lost(done[key_of(dense)], found, judge.samples(dense), judge.samples(about))
    return found


def _require_gate(model: str, done: Any) -> None:
    for result in done:
        if (result.get("model"), result.get("training")) == (model, GATE) and not passes(result):
            raise ValueError(
                f"the gate is not passed by seed {result['seed']}: with a single token the detector keeps more than "
                "two thirds of its AP, so that the ViT hardly matters to it, and methods would be ranked by chance; "
                "--redraw writes what was measured"
            )


ITEMS = (Detection(),)
