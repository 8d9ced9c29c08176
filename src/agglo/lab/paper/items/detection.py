"""AP of detectors with fewer tokens, off the shelf and fine-tuned: the paper's two tables of COCO.

Apart from AP there are differences between cells: of each method to dense, and of what the paper's tables say of which
method is ahead of which.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agglo.lab.paper import compare, printed
from agglo.lab.paper.classifiers import FASHION, SHELF, TUNED, data_need
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.detectors import (
    BOX_AND_MASK,
    COCO,
    COLLAPSED,
    DENSE_WITH_TOKEN,
    FULL,
    MINIATURE,
    DetectorScale,
    Judge,
    is_kept,
    published,
    start,
)
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import CannotRunError, Need, Result, RunCell, Section, Settings, Study, StudyCell
from agglo.lab.tasks.detection.evaluation.matches import interval
from agglo.utils.journal import key_of
from agglo.utils.tables import Column, Table

GATE = "gate"  # of cells with a single token: a detector that then loses little hardly needs the ViT
_UNREDUCED = (DENSE, DENSE_WITH_TOKEN, COLLAPSED.name)

Case = tuple[str, str, float | None]  # training, method, keep rate


class Difference(NamedTuple):
    """AP of one case minus that of another, which is measured with its interval."""

    name: str
    first: Case
    second: Case


def ahead(training: str, better: str, worse: str, rate: float) -> Difference:
    name = f"{training} at {rate:.0%}: {better} ahead of {worse}"
    return Difference(name, (training, better, rate), (training, worse, rate))


# Above 0 in the paper's table for both of its detectors, for boxes and for masks.
CLAIMS = tuple(
    ahead(*case)
    for case in (
        (SHELF, "atc average", "tome", 0.5),
        (SHELF, "atc complete", "tome", 0.5),
        (SHELF, "tome", "atc single", 0.5),
        (SHELF, "atc average", "atc single", 0.5),
        (SHELF, "atc average", "atc single", 0.25),
        (SHELF, "atc complete", "atc average", 0.25),
        (TUNED, "atc average", "tome", 0.5),
        (TUNED, "atc complete", "tome", 0.5),
        (TUNED, "atc average", "atc single", 0.5),
        (TUNED, "atc average", "atc single", 0.25),
    )
)
# Against what the paper's tables do not have at these keep rates.
_OTHERS = [(t, r, other) for t in (SHELF, TUNED) for r in (0.25, 0.5) for other in ("pool", "random", "evit")]
FURTHER = tuple(ahead(training, "atc average", other, rate) for training, rate, other in _OTHERS)


def to_dense(training: str, method: str, rate: float) -> str:
    return f"{training}: {method} {rate:.0%} to dense"


def differences_of(scale: DetectorScale) -> list[Difference]:
    """Return all differences that a scale has the cells for.

    In full the dense detector is not trained on: the fine-tuned ones are compared with it as it is.
    """
    found = []
    for training, rate, entry in scale.reduced:
        dense = (training if scale.is_miniature else SHELF, scale.dense_name(entry.name), None)
        found.append(Difference(to_dense(training, entry.name, rate), (training, entry.name, rate), dense))
    known = [each.first for each in found]
    return found + [each for each in (*CLAIMS, *FURTHER) if each.first in known and each.second in known]


def _axes(scale: DetectorScale, settings: Settings) -> Iterator[StudyCell]:
    seeds = {SHELF: settings.seeds or scale.shelf_seeds, TUNED: settings.seeds or scale.tuned_seeds}
    dense = dict.fromkeys([DENSE, *(scale.dense_name(entry.name) for entry in scale.methods)])
    cases: list[tuple[str, str, float | None]] = [(SHELF, name, None) for name in dense]
    if scale.is_miniature:
        cases += [(GATE, COLLAPSED.name, None), (TUNED, DENSE, None)]
    cases += [(training, entry.name, rate) for training, rate, entry in scale.reduced]
    for model in scale.models:
        for training, method, rate in cases:
            for seed in range(seeds[TUNED if training == TUNED else SHELF]):
                about = {"model": model, "training": training, "method": method, "keep_rate": rate, "seed": seed}
                yield StudyCell(about, _needs(settings, scale, model, [method]))
        for name, *pair in differences_of(scale):
            compared = min(seeds[training] for training, *_ in pair)
            needs = _needs(settings, scale, model, [method for _, method, _ in pair])
            yield StudyCell({"model": model, "difference": name, "seeds": list(range(compared))}, needs)


def _published(model: str) -> Need:
    return Need("weights", published(model), f"the dense detector {model}, in place of training it")


def _needs(settings: Settings, scale: DetectorScale, model: str, methods: Sequence[str]) -> tuple[Need, ...]:
    """Return data, and a dense detector or what one is trained from."""
    if scale.is_miniature:
        return (data_need(FASHION),)
    found = [Need("data", COCO, "COCO 2017: train2017, val2017, annotations")]
    is_given, asking = published(model) in settings.weights, [scale.asks(method) for method in methods]
    found += [Need("weights", start(model), f"DeiT {model}")] if not is_given or any(asking) else []
    return (*found, _published(model)) if is_given and not all(asking) else tuple(found)


def _run(scale: DetectorScale, settings: Settings) -> RunCell:
    judge = Judge(settings, scale, "detection")
    pairs = {name: pair for name, *pair in differences_of(scale)}
    return lambda about: (
        _difference(judge, pairs[about["difference"]], about) if "difference" in about else judge(about)
    )


def _difference(judge: Judge, pair: Sequence[Case], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by "box" and "mask", a difference of means over seeds with its 95 % interval over resampled images.

    A cell whose match tables are gone is evaluated again.
    """
    done = {key_of(result["cell"]): result for result in read_results(judge.settings.folder(judge.item))}
    where = [dict(zip(("training", "method", "keep_rate"), case, strict=True)) for case in pair]
    cells = [[{"model": about["model"], **case, "seed": seed} for case in where] for seed in about["seeds"]]
    for cell in (cell for both in cells for cell in both):
        if "cannot" in (result := done[key_of(cell)]):
            raise CannotRunError(result["cannot"])
        if not is_kept(judge.folder(cell)):
            print(f"agglo: the match tables of {cell} are gone; evaluated again", file=sys.stderr)
            judge(cell)
    found = {}
    for kind in BOX_AND_MASK if judge.is_main else ():
        values = [done[key_of(a)][f"{kind}_AP"] - done[key_of(b)][f"{kind}_AP"] for a, b in cells]
        samples = [judge.samples(a)[kind] - judge.samples(b)[kind] for a, b in cells]
        low, high = interval(np.mean(samples, axis=0))
        found[kind] = {"value": float(np.mean(values)), "low": low, "high": high, "by_seed": values}
    return found


def _table(results: Sequence[Result], scale: DetectorScale) -> list[Section]:
    found = []
    for (model,), here in compare.grouped(results, "model").items():
        prefix = "" if len(scale.models) == 1 else f"{model}, "
        differences = {result["difference"]: result for result in here if "difference" in result}
        for training, cases in ((SHELF, (SHELF, GATE)), (TUNED, (TUNED,))):
            measured = [result for result in here if result.get("training") in cases]
            if not measured:
                continue
            name = f"{prefix}{training}"
            found += [_average_precision(measured, kind, training, name, scale) for kind in BOX_AND_MASK]
            once = dict.fromkeys((result["method"], result["keep_rate"]) for result in measured)
            apart = [
                {**differences[to_dense(training, method, rate)], "method": method, "keep_rate": rate}
                for method, rate in once
                if rate is not None and to_dense(training, method, rate) in differences
            ]
            text = "Box and mask AP, with 95 % intervals over resampled images."
            found.append(Section(f"{name}: difference to dense", compare.by_rate(apart, _intervals), text))
            if training == SHELF:
                dense = next((f"Dense: {r['gflops']:.3f}." for r in measured if r["method"] == DENSE), "")
                table = compare.by_rate(measured, lambda result: result["gflops"], ".3f")
                found.append(Section(f"{prefix}GFLOPs of the backbone", table, dense))
        found += _difference_sections(differences, prefix)
    return found


def _average_precision(results: Sequence[Result], kind: str, training: str, name: str, scale: DetectorScale) -> Section:
    """Return a table of measured and printed AP; what is not reduced stands above it."""
    model = "tiny" if scale.is_miniature else results[0]["model"]
    reduced = [result for result in results if result["method"] not in _UNREDUCED]
    found = compare.by_method(
        reduced,
        "keep_rate",
        f"{kind}_AP",
        expected=lambda row, rate: compare.printed_value("detection", model, training, row, rate, kind),
        comparable=not scale.is_miniature,
    )
    parts = []
    for method in _UNREDUCED:
        value = compare.over_seeds([result for result in results if result["method"] == method], f"{kind}_AP")
        number = printed.value("detection", model, training, method, kind) if found.comparable else None
        as_printed = "" if number is None else f" (printed: {number:.1f})"
        parts += [] if value is None else [f"{method.capitalize()}: {value}{as_printed}."]
    seeds = len({result["seed"] for result in results})
    over = f"Mean over {seeds} seeds of training, in brackets the standard deviation."
    parts.append("One seed: nothing is known about the spread between trainings." if seeds == 1 else over)
    if found.comparable:
        remarks = f"Of the printed numbers: {'; '.join(printed.table('detection')['remarks'])}."
        parts += ["+- is one standard error, of our images and seeds.", remarks, found.remarks()]
    else:
        parts.append("Printed numbers are of ViT-Adapter-T on COCO: they cannot stand beside these.")
    text = f"{' '.join(parts)}\n\n{compare.reasons(results) if kind == BOX_AND_MASK[-1] else ''}"
    return Section(f"{name}: {kind} AP", found.table(), text.strip())


def _intervals(result: Result) -> str:
    return " / ".join(_with_interval(result[kind]) for kind in BOX_AND_MASK)


def _with_interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def _difference_sections(differences: Mapping[str, Result], prefix: str) -> list[Section]:
    text = (
        "Each line is above 0 in the paper's table for both detectors, for boxes and for masks. Differences are of "
        "means over seeds, in points of AP, with 95 % intervals over resampled images; then the box AP of each seed."
    )
    columns = [Column("difference", left=True), Column("box AP"), Column("mask AP"), Column("seeds", left=True)]
    sections = []
    for title, wanted, note in (
        ("what the paper's table says", CLAIMS, text),
        ("not in the paper's table at these keep rates", FURTHER, ""),
    ):
        rows = []
        for name, *_ in wanted:
            if (found := differences.get(name)) and "cannot" not in found:
                by_seed = ", ".join(f"{value:+.1f}" for value in found["box"]["by_seed"])
                rows.append([name, *(_with_interval(found[kind]) for kind in BOX_AND_MASK), by_seed])
        sections += [Section(f"{prefix}{title}", Table(columns, rows), note)] if rows else []
    return sections


def _draw(results: Sequence[Result], scale: DetectorScale, settings: Settings, folder: Path) -> list[Path]:
    """Draw AP by keep rate, one panel per model, training and kind that has several keep rates."""
    panels = []
    measured = [result for result in results if result.get("training") in (SHELF, TUNED)]
    for (model, training), here in compare.grouped(measured, "model", "training").items():
        if len({result["keep_rate"] for result in here} - {None}) > 1:
            for kind in BOX_AND_MASK:
                title = f"{model}, {training}, {kind}"
                panels += compare.panel(here, f"{kind}_AP", title, y_label=f"{kind} AP")
    return compare.draw_panels(panels, folder / "ap.png")


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
    gpu_hours="1,665",
    full=FULL,
    miniature=MINIATURE,
    axes=_axes,
    run=_run,
    table=_table,
    draw=_draw,
    optional=tuple(map(_published, FULL.models)),
)
ITEMS = (DETECTION,)
