"""AP of detectors with fewer tokens, off the shelf and fine-tuned: the paper's two tables of COCO."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agglo.lab.paper.classifiers import FASHION, data_need
from agglo.lab.paper.detection_tables import Claim, Term, claims_of, difference, draw_ap, lost, passes, tables
from agglo.lab.paper.detectors import (
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
    DetectorScale,
    Judge,
    is_kept,
    published,
    start,
)
from agglo.lab.paper.estimates import TRAINING, Size
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import CannotRunError, Cell, Need, Result, RunCell, Settings, Study
from agglo.schedule import Stages
from agglo.utils.journal import key_of

# Images of 800 x 1333 pixels have about 4200 patches; the neck and the heads cost as much for any backbone.
_SIZES = {"tiny": Size(192, 12, 4200), "small": Size(384, 12, 4200), "miniature": Size(64, 12)}
_HEADS = {COCO: 2e11, FASHION: 3e8}
_TRAINING_IMAGES = {COCO: 117_266, FASHION: 4000}
_VALIDATION_IMAGES = 5000
_RESAMPLING = 1e9  # no pass of a model, but some seconds
_EPOCHS = {"dense": 36, "tiny": 6, "small": 4, "miniature": 1}


def _published(model: str) -> Need:
    return Need("weights", published(model), f"the dense detector {model}, in place of training it")


def _axes(scale: DetectorScale, settings: Settings) -> Iterator[Cell]:
    seeds = {SHELF: settings.seeds or scale.shelf_seeds, TUNED: settings.seeds or scale.tuned_seeds}
    shelf, tuned = range(seeds[SHELF]), range(seeds[TUNED])
    dense = dict.fromkeys([DENSE, *map(scale.dense_name, scale.methods)])
    places: list[tuple[str, str, float | None, int]] = [(SHELF, name, None, seed) for seed in shelf for name in dense]
    if scale.gate:
        places += [(GATE, COLLAPSED.name, None, seed) for seed in shelf]
    for rate in scale.shelf_rates:
        places += [(SHELF, entry.name, rate, seed) for seed in shelf for entry in scale.shelf]
    if scale.tuned_dense:
        places += [(TUNED, DENSE, None, seed) for seed in tuned]
    for rate in scale.tuned_rates:
        places += [(TUNED, entry.name, rate, seed) for seed in tuned for entry in scale.fine_tuned]
    for model in scale.models:
        for place in places:
            about = {"model": model, **dict(zip(("training", "method", "keep_rate", "seed"), place, strict=True))}
            yield Cell(about, _needs(settings, scale, model, [place[1]]), _cost(settings, scale, about))
        for claim in claims_of(scale):
            compared = min(seeds[term.training] for term in claim.terms)
            needs = _needs(settings, scale, model, [term.method for term in claim.terms])
            yield Cell({"model": model, "difference": claim.words, "seeds": list(range(compared))}, needs, _RESAMPLING)


def _needs(settings: Settings, scale: DetectorScale, model: str, methods: Sequence[str]) -> tuple[Need, ...]:
    """Return data, and a dense detector or what one is trained from."""
    if scale.is_miniature:
        return (data_need(FASHION),)
    found = [Need("data", COCO, "COCO 2017: train2017, val2017, annotations")]
    asking = {entry.name for entry in scale.methods if entry.method in ASKING} | {DENSE_WITH_TOKEN}
    given = published(model) in settings.weights
    if not given or any(method in asking for method in methods):
        found.append(Need("weights", start(model), f"DeiT {model}"))
    if given and any(method not in asking for method in methods):
        found.append(_published(model))
    return tuple(found)


def _cost(settings: Settings, scale: DetectorScale, about: Mapping[str, Any]) -> float:
    """Return the multiply-adds of an evaluation, and of the training that comes before."""
    model, rate = about["model"], about["keep_rate"]
    one = _HEADS[scale.data] + _SIZES[model].multiply_adds(None if rate is None else Stages(rate))
    passes = scale.validation or _VALIDATION_IMAGES
    recipe, epochs = scale.tuned[1], _EPOCHS[model]
    if about["training"] != TUNED:
        recipe, epochs = scale.dense[1], scale.dense[1].get("epochs", _EPOCHS["dense"])
        given = [DENSE] if published(model) in settings.weights else []
        if about["method"] in given or about["method"] not in (DENSE, DENSE_WITH_TOKEN):
            epochs = 0
    return one * (passes + TRAINING * epochs * recipe.get("scenes", _TRAINING_IMAGES[scale.data]))


def _run(scale: DetectorScale, settings: Settings) -> RunCell:
    judge = Judge(settings, scale, "detection")
    claims = {claim.words: claim for claim in claims_of(scale)}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        done = {key_of(result["cell"]): result for result in read_results(settings.folder("detection"))}
        if "difference" in about:
            return _compare(judge, claims[about["difference"]], about, done)
        if about["training"] == GATE:
            return _collapse(judge, about, done)
        if scale.gate and about["method"] != DENSE:
            _require_gate(about["model"], done)
        return judge(about)

    return run


def _compare(judge: Judge, claim: Claim, about: Mapping[str, Any], done: Mapping[str, Result]) -> dict[str, Any]:
    """Return a difference; CannotRunError where one of the cells could not be run."""

    def place(term: Term, seed: int) -> dict[str, Any]:
        where = {"model": about["model"], "training": term.training, "method": term.method}
        return {**where, "keep_rate": term.keep_rate, "seed": seed}

    def result(term: Term, seed: int) -> Result:
        return done[key_of(place(term, seed))]

    pairs = [(term, seed) for term in claim.terms for seed in about["seeds"]]
    for pair in pairs:
        if "cannot" in result(*pair):
            raise CannotRunError(result(*pair)["cannot"])
    for pair in pairs:
        if not is_kept(judge.folder(place(*pair))):
            print(f"agglo: the match tables of {place(*pair)} are gone; evaluated again", file=sys.stderr)
            judge(place(*pair))
    if not judge.is_main:
        return {}
    return difference(claim, about["seeds"], result, lambda term, seed: judge.samples(place(term, seed)))


def _collapse(judge: Judge, about: Mapping[str, Any], done: Mapping[str, Result]) -> dict[str, Any]:
    """Evaluate a detector with a single token, and what that costs."""
    dense = {**about, "training": SHELF, "method": DENSE}
    if not is_kept(judge.folder(dense)):
        judge(dense)
    found = judge(about)
    if judge.is_main:
        found["lost"] = lost(done[key_of(dense)], found, judge.samples(dense), judge.samples(about))
    return found


def _require_gate(model: str, done: Mapping[str, Result]) -> None:
    for result in done.values():
        if (result.get("model"), result.get("training")) == (model, GATE) and not passes(result):
            raise ValueError(
                f"the gate is not passed by seed {result['seed']}: with a single token the detector keeps more than "
                "two thirds of its AP, so that the ViT hardly matters to it, and methods would be ranked by chance; "
                "--redraw writes what was measured"
            )


DETECTION = Study(
    name="detection",
    shows="tables objdetseg, objdetsegFull",
    about="Box and mask AP on COCO 2017 of Mask R-CNN on ViT-Adapter T and S with tokens reduced at blocks 3, 6 and 9, "
    "off the shelf and fine-tuned from the dense detector: ATC with three linkages, ToMe, SViT, Evo-ViT, DynamicViT "
    "with and without preserved tokens, EViT and ATS. EViT, ATS and Evo-ViT ask a class token, which the published "
    "detectors do not have: they get a dense detector of their own",
    stands_in="A small detector of garments in scenes made from Fashion-MNIST stands in, trained with a class token, "
    "so that one detector serves all methods; pooling, random dropping, K-Medoids, DPC-KNN and Top-K come beside. Off "
    "the shelf by two seeds of training, fine-tuned at 50 % by one.",
    full=FULL,
    miniature=MINIATURE,
    axes=_axes,
    run=_run,
    table=tables,
    draw=lambda results, scale, settings, folder: draw_ap(results, folder / "ap.png"),
    optional=tuple(map(_published, FULL.models)),
    only_asked=True,  # cells of seeds that are not finished stay out
)
ITEMS = (DETECTION,)
