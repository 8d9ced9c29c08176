"""The tables and the picture of detectors, from results alone: the gate, AP beside printed AP, ranks, who is ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from agglo.detection.evaluation.one_pass import KINDS
from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.reproduce import printed
from agglo.reproduce.compare import Value, beside, disagreements, grouped, percent, printed_value, reasons
from agglo.reproduce.detection_claims import BESIDES, CLAIMS, Claim, passes, to_dense_words, verdict
from agglo.reproduce.detectors import DENSE, DENSE_WITH_TOKEN, GATE, SHELF, TUNED, Scale
from agglo.reproduce.item import Result, Section

Places = dict[Any, list[Result]]
_DENSE = (DENSE, DENSE_WITH_TOKEN)


def tables(results: Sequence[Result], scale: Scale, miniature: bool) -> list[Section]:
    """Without a passed gate no method is told from another: it would be chance."""
    found = []
    for model in scale.models:
        here = [result for result in results if result["model"] == model]
        prefix = "" if len(scale.models) == 1 else f"{model}, "
        gates = [result for result in here if result.get("training") == GATE]
        if gates:
            found.append(_gate(here, gates))
        if scale.gate and not (gates and all(map(passes, gates))):
            said = "The gate is not passed by every seed." if gates else "No detector came to the gate yet."
            found.append(Section(f"{prefix}not ranked", text=said))
            continue
        for training in (SHELF, TUNED):
            found += _of_training(here, scale, training, prefix, miniature)
        found += _claims(here, scale, prefix)
    return found


def ap(results: Sequence[Result], kind: str) -> Value | str | None:
    """Over seeds; its error is that of the images and of the seeds, where these are known."""
    done = [result for result in results if f"{kind}_AP" in result]
    if not done:
        return CANNOT if any("cannot" in result for result in results) else None
    numbers = [result[f"{kind}_AP"] for result in done]
    spread = stdev(numbers) if len(numbers) > 1 else None
    parts = [] if spread is None else [spread / math.sqrt(len(numbers))]
    if all(f"{kind}_error" in result for result in done):
        parts.append(mean(result[f"{kind}_error"] for result in done))
    return Value(mean(numbers), math.hypot(*parts) if parts else None, spread, len(numbers))


def _gate(results: Sequence[Result], gates: Sequence[Result]) -> Section:
    columns = [Column("seed")]
    for kind in KINDS.values():
        columns += [Column(f"{kind} AP, dense", ".1f"), Column("one token", ".1f"), Column("lost", left=True)]
    rows = []
    for gate in sorted(gates, key=lambda result: result["seed"]):
        dense = next(result for result in results if _place(result) == (SHELF, DENSE, None, gate["seed"]))
        row: list[Any] = [gate["seed"]]
        for kind in KINDS.values():
            share = gate["lost"][kind]
            told = f"{share['share']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"
            row += [dense[f"{kind}_AP"], gate[f"{kind}_AP"], told]
        rows.append([*row, "passed" if passes(gate) else "not passed"])
    text = "All tokens collapsed to one must cost a third of the dense AP; in brackets 95 % intervals."
    return Section("The gate", Table([*columns, Column("gate", left=True)], rows), text)


def _place(result: Result) -> tuple[Any, ...]:
    return tuple(result.get(name) for name in ("training", "method", "keep_rate", "seed"))


def _of_training(results: Sequence[Result], scale: Scale, training: str, prefix: str, miniature: bool) -> list[Section]:
    here = [result for result in results if result.get("training") == training]
    if not here:
        return []
    places: Places = dict(grouped(here, "method", "keep_rate"))
    rates = sorted({rate for _, rate in places} - {None}, reverse=True)
    rows = [str(name) for name in dict.fromkeys(name for name, _ in places) if name not in _DENSE]
    of_paper = "tiny" if miniature else here[0]["model"]
    found = []
    for kind in KINDS.values():

        def expected(row: str, rate: float, kind: str = kind) -> Value | None:
            return printed_value(printed.value("detection", of_paper, training, row, rate, kind))

        def measured(row: str, rate: float, kind: str = kind) -> Value | str | None:
            return ap(places.get((row, rate), []), kind)

        text = " ".join([_of_dense(places, training, of_paper, kind, miniature), _notes(here, scale, kind, miniature)])
        if not miniature and (apart := disagreements(rows, rates, measured, expected)):
            text += f" {apart}."
        table = beside("method", rows, rates, measured, expected, percent, comparable=not miniature)
        found.append(Section(f"{prefix}{training}: {kind} AP", table, text.strip()))
    ranked = [rate for rate in rates if rate in scale.ranked]
    if why := reasons(here):
        found[-1] = Section(found[-1].title, found[-1].table, f"{found[-1].text}\n\n{why}")
    found.append(
        Section(f"{prefix}{training}: ranks", _ranks(places, rows, ranked), "Of means over seeds, 1 the best.")
    )
    return [*found, *_to_dense(results, training, rows, rates, prefix), *_gflops(places, rows, rates, training, prefix)]


def _of_dense(places: Places, training: str, model: str, kind: str, miniature: bool) -> str:
    told = []
    for name in _DENSE:
        value = ap(places.get((name, None), []), kind)
        number = printed.value("detection", model, training, name, kind)
        beside_it = "" if number is None or miniature else f" (printed: {number:.1f})"
        told += [] if value is None else [f"{name.capitalize()}: {value}{beside_it}."]
    return " ".join(told)


def _notes(results: Sequence[Result], scale: Scale, kind: str, miniature: bool) -> str:
    seeds = len({result["seed"] for result in results})
    over = "One seed: nothing is known about the spread between trainings." if seeds == 1 else (
        f"Mean over {seeds} seeds of training, in brackets the standard deviation."
    )  # fmt: skip
    if miniature:
        return f"{over} Printed numbers are of ViT-Adapter-T on COCO: they cannot stand beside these."
    remarks = "; ".join(printed.table("detection")["remarks"])
    return f"{over} +- is one standard error, of our images and seeds. Of the printed numbers: {remarks}."


def ranks(places: Places, kind: str, rate: float) -> dict[str, float]:
    """Of means over seeds at one keep rate, among those that can leave so few tokens; equals share theirs."""
    from scipy.stats import rankdata

    values = {name: ap(here, kind) for (name, other), here in places.items() if other == rate}
    able = {str(name): value.number for name, value in values.items() if isinstance(value, Value)}
    return dict(zip(able, map(float, rankdata([-number for number in able.values()])), strict=True))


def _ranks(places: Places, rows: Sequence[str], rates: Sequence[float]) -> Table:
    ranked = {(kind, rate): ranks(places, kind, rate) for kind in KINDS.values() for rate in rates}
    columns = [Column("method", left=True), *(Column(f"{kind} AP, {percent(rate)}", "g") for kind, rate in ranked)]
    return Table(columns, [[row, *(found.get(row) for found in ranked.values())] for row in rows])


def _with_interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def _to_dense(
    results: Sequence[Result], training: str, rows: Sequence[str], rates: Sequence[float], prefix: str
) -> list[Section]:
    by_words = {result["difference"]: result for result in results if "difference" in result}
    if not by_words:
        return []

    def told(row: str, rate: float) -> str | None:
        found = by_words.get(to_dense_words(training, row, rate))
        if found is None:
            return None
        return CANNOT if "cannot" in found else " / ".join(_with_interval(found[kind]) for kind in KINDS.values())

    columns = [Column("method", left=True), *(Column(percent(rate)) for rate in rates)]
    table = Table(columns, [[row, *(told(row, rate) for rate in rates)] for row in rows])
    text = "Box and mask AP, with 95 % intervals over resampled images."
    return [Section(f"{prefix}{training}: difference to dense", table, text)]


def _gflops(places: Places, rows: Sequence[str], rates: Sequence[float], training: str, prefix: str) -> list[Section]:
    if training != SHELF:
        return []

    def told(row: str, rate: float) -> str | None:
        here = places.get((row, rate))
        return None if not here else CANNOT if "cannot" in here[0] else f"{here[0]['gflops']:.3f}"

    columns = [Column("method", left=True), *(Column(percent(rate)) for rate in rates)]
    dense = places.get((DENSE, None))
    text = "" if not dense else f"Dense: {dense[0]['gflops']:.3f}."
    table = Table(columns, [[row, *(told(row, rate) for rate in rates)] for row in rows])
    return [Section(f"{prefix}GFLOPs of the backbone", table, text)]


def _claims(results: Sequence[Result], scale: Scale, prefix: str) -> list[Section]:
    by_words = {result["difference"]: result for result in results if "difference" in result}
    agreeing = _claim_table(by_words, CLAIMS, verdicts=True)
    further = _claim_table(by_words, BESIDES, verdicts=False)
    text = (
        "Each line holds in the paper's table for both detectors, for boxes and for masks. Differences are of means "
        "over seeds, in points of AP, with 95 % intervals over resampled images. A line is decided where the interval "
        "leaves out 0 and the seeds agree: all on one side, and their mean above their standard deviation."
    )
    found = [Section(f"{prefix}what agrees with the paper, and what does not", agreeing, text)] if agreeing.rows else []
    if further.rows:
        found.append(Section(f"{prefix}not in the paper's table at these keep rates", further))
    return found


def _claim_table(by_words: Mapping[str, Result], claims: Sequence[Claim], *, verdicts: bool) -> Table:
    columns = [Column("in the paper" if verdicts else "difference", left=True), Column("box AP"), Column("mask AP")]
    columns += [Column("seeds", left=True)] + ([Column("here", left=True)] if verdicts else [])
    rows = []
    for claim in claims:
        found = by_words.get(claim.words)
        if found is None or "cannot" in found:
            continue
        # One number is no spread, but its sign is something.
        by_seed = ", ".join(f"{value:+.1f}" for value in found["box"]["by_seed"])
        row = [claim.words, *(_with_interval(found[kind]) for kind in KINDS.values()), by_seed]
        rows.append([*row, verdict(found)] if verdicts else row)
    return Table(columns, rows)


def draw_ap(results: Sequence[Result], path: Path) -> list[Path]:
    """AP by keep rate, one panel per model, training and kind that has a curve; none where nothing is ranked."""
    path.unlink(missing_ok=True)
    if any(result.get("training") == GATE and not passes(result) for result in results):
        return []
    panels = []
    measured = [result for result in results if result.get("training") in (SHELF, TUNED)]
    for (model, training), here in grouped(measured, "model", "training").items():
        places: Places = dict(grouped(here, "method", "keep_rate"))
        for kind in KINDS.values():
            curves = [_curve(places, str(name), kind) for name in dict.fromkeys(name for name, _ in places)]
            curves = [curve for curve in curves if len(curve.x) > 1]
            dense = ap(places.get((DENSE, None), []), kind)
            if curves and isinstance(dense, Value):
                ticks = sorted({x for curve in curves for x in curve.x})
                title, label = f"{model}, {training}, {kind}", "keep rate at each stage"
                panels.append(CurvePanel(curves, label, f"{kind} AP", Level(dense.number), title, ticks))
    if not panels:
        return []
    draw_curves(panels, path)
    return [path]


def _curve(places: Places, name: str, kind: str) -> Curve:
    rates = sorted(rate for other, rate in places if other == name and rate is not None)
    values = [ap(places[name, rate], kind) for rate in rates]
    done = [(rate, value.number) for rate, value in zip(rates, values, strict=True) if isinstance(value, Value)]
    return Curve(name, [rate for rate, _ in done], [number for _, number in done])
