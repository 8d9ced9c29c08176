"""The tables and the figure of detectors, from results alone: the gate, AP beside printed AP, ranks, who is ahead.

A claim is a difference between cells: of each method to dense, and what the paper's tables say of who is ahead of whom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from agglo.drawing.charts import CurvePanel, Level, draw_curves
from agglo.lab.paper import printed
from agglo.lab.paper.compare import (
    Measured,
    Value,
    beside,
    by_method,
    curve_of,
    disagreements,
    grouped,
    over_seeds,
    percent,
    plain_table,
    printed_value,
    reasons,
    ticks_of,
)
from agglo.lab.paper.detectors import DENSE, DENSE_WITH_TOKEN, GATE, SHELF, TUNED, DetectorScale, Samples
from agglo.lab.paper.study import Result, Section
from agglo.lab.tasks.detection.evaluation.matches import interval
from agglo.lab.tasks.detection.evaluation.one_pass import KINDS
from agglo.utils.tables import CANNOT, Column, Table

LEAST_LOST = 1 / 3  # of the dense AP, with a single token
_DENSE = (DENSE, DENSE_WITH_TOKEN)


class Term(NamedTuple):
    """A cell in a sum of AP: added, or with sign -1 taken away."""

    sign: int
    training: str
    method: str
    keep_rate: float | None = None


class Claim(NamedTuple):
    """Something that is above 0 in the paper's table for both of its detectors, for boxes and for masks."""

    words: str
    terms: tuple[Term, ...]


def ahead(training: str, better: str, worse: str, rate: float) -> Claim:
    words = f"{training} at {rate:.0%}: {better} ahead of {worse}"
    return Claim(words, (Term(1, training, better, rate), Term(-1, training, worse, rate)))


def to_dense_words(training: str, name: str, rate: float) -> str:
    return f"{training}: {name} {rate:.0%} to dense"


def _recovers(name: str, rate: float) -> Claim:
    words = f"{name} at {rate:.0%}: fine-tuned it loses less against dense than off the shelf"
    tuned, shelf = ((Term(1, each, name, rate), Term(-1, each, DENSE)) for each in (TUNED, SHELF))
    return Claim(words, (*tuned, *(term._replace(sign=-term.sign) for term in shelf)))


CLAIMS = (
    ahead(SHELF, "atc average", "tome", 0.5),
    ahead(SHELF, "atc complete", "tome", 0.5),
    ahead(SHELF, "tome", "atc single", 0.5),
    ahead(SHELF, "atc average", "atc single", 0.5),
    ahead(SHELF, "atc average", "atc single", 0.25),
    ahead(SHELF, "atc complete", "atc average", 0.25),
    ahead(TUNED, "atc average", "tome", 0.5),
    ahead(TUNED, "atc complete", "tome", 0.5),
    ahead(TUNED, "atc average", "atc single", 0.5),
    ahead(TUNED, "atc average", "atc single", 0.25),
    _recovers("atc average", 0.25),
    _recovers("atc average", 0.5),
    _recovers("tome", 0.5),
)
# Against what the paper's tables do not have at these keep rates.
BESIDES = tuple(
    ahead(training, "atc average", other, rate)
    for training in (SHELF, TUNED)
    for rate in (0.25, 0.5)
    for other in ("pool", "random", "evit")
)


def claims_of(scale: DetectorScale) -> list[Claim]:
    """Return all differences that a scale has the cells for."""
    found = []
    for training, methods, rates in (
        (SHELF, scale.shelf, scale.shelf_rates),
        (TUNED, scale.fine_tuned, scale.tuned_rates),
    ):
        for rate in rates:
            for entry in methods:
                terms = Term(1, training, entry.name, rate), Term(-1, training, scale.dense_name(entry))
                found.append(Claim(to_dense_words(training, entry.name, rate), terms))
    known = {term[1:] for claim in found for term in claim.terms}
    found += [claim for claim in (*CLAIMS, *BESIDES) if all(term[1:] in known for term in claim.terms)]
    if scale.tuned_dense:
        return found
    # Where the dense detector is not trained on, the fine-tuned ones are compared with it as it is.
    return [
        Claim(words, tuple(term._replace(training=SHELF) if term.keep_rate is None else term for term in terms))
        for words, terms in found
    ]


def difference(
    claim: Claim,
    seeds: Sequence[int],
    result: Callable[[Term, int], Mapping[str, Any]],
    samples: Callable[[Term, int], Samples],
) -> dict[str, Any]:
    """Return, by "box" and "mask", a difference of means over seeds with its 95 % interval over resampled images."""
    found = {}
    for kind in KINDS.values():
        values = [sum(term.sign * result(term, seed)[f"{kind}_AP"] for term in claim.terms) for seed in seeds]
        parts = [[term.sign * samples(term, seed)[kind] for term in claim.terms] for seed in seeds]
        low, high = interval(np.sum(parts, axis=1).mean(axis=0))
        found[kind] = {"value": float(np.mean(values)), "low": low, "high": high, "by_seed": values}
    return found


def lost(
    dense: Mapping[str, Any], collapsed: Mapping[str, Any], of_dense: Samples, of_collapsed: Samples
) -> dict[str, Any]:
    """Return, by kind, the fraction of AP lost with a single token, with its interval."""
    found = {}
    for kind in KINDS.values():
        share = float(_lost(np.array(dense[f"{kind}_AP"]), np.array(collapsed[f"{kind}_AP"])))
        low, high = interval(_lost(of_dense[kind], of_collapsed[kind]))
        found[kind] = {"share": share, "low": low, "high": high}
    return found


def _lost(dense: Any, collapsed: Any) -> Any:
    """Fraction of AP lost; 0 if dense AP is 0."""
    return np.where(dense > 0, 1 - collapsed / np.where(dense > 0, dense, 1), 0.0)


def passes(collapsed: Mapping[str, Any]) -> bool:
    """Return whether a detector loses enough: otherwise it hardly needs the ViT, and methods differ by chance."""
    return all(collapsed["lost"][kind]["share"] >= LEAST_LOST for kind in KINDS.values())


def verdict(found: Mapping[str, Any]) -> str:
    """Say what intervals over images and the seeds tell about a claim that both differences are above 0."""
    kinds = list(KINDS.values())
    by_images = [kind for kind in kinds if found[kind]["low"] > 0 or found[kind]["high"] < 0]
    sure = [kind for kind in by_images if _seeds_agree(found[kind]["by_seed"])]
    if not sure:
        return "undecided: seeds differ by more" if by_images else "undecided"
    signs = {found[kind]["value"] > 0 for kind in sure}
    if len(signs) > 1:
        return "boxes and masks disagree"
    said = "agrees" if signs == {True} else "the other way round"
    said = said if len(sure) == len(kinds) else f"only {sure[0]} AP: {said}"
    return f"{said} (one seed)" if len(found[sure[0]]["by_seed"]) == 1 else said


def _seeds_agree(differences: Sequence[float]) -> bool:
    """Return whether all seeds are on one side of 0, further from it than they are apart; one cannot disagree."""
    if len(differences) == 1:
        return True
    one_side = min(differences) > 0 or max(differences) < 0
    return one_side and abs(fmean(differences)) > stdev(differences)


def tables(results: Sequence[Result], scale: DetectorScale) -> list[Section]:
    """Make all tables. Without a passed gate no method is told from another: it would be chance."""
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
            found += _of_training(here, scale, training, prefix)
        found += _claims(here, prefix)
    return found


def _gate(results: Sequence[Result], gates: Sequence[Result]) -> Section:
    columns = [Column("seed")]
    for kind in KINDS.values():
        columns += [Column(f"{kind} AP, dense", ".1f"), Column("one token", ".1f"), Column("lost", left=True)]
    by_seed = grouped(results, "training", "method", "seed")
    rows = []
    for gate in sorted(gates, key=lambda result: result["seed"]):
        [dense] = by_seed[SHELF, DENSE, gate["seed"]]
        row: list[Any] = [gate["seed"]]
        for kind in KINDS.values():
            share = gate["lost"][kind]
            told = f"{share['share']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"
            row += [dense[f"{kind}_AP"], gate[f"{kind}_AP"], told]
        rows.append([*row, "passed" if passes(gate) else "not passed"])
    text = "All tokens collapsed to one must cost a third of the dense AP; in brackets 95 % intervals."
    return Section("The gate", Table([*columns, Column("gate", left=True)], rows), text)


def _of_training(results: Sequence[Result], scale: DetectorScale, training: str, prefix: str) -> list[Section]:
    here = [result for result in results if result.get("training") == training]
    if not here:
        return []
    of_paper = "tiny" if scale.is_miniature else here[0]["model"]
    found, ranked = [], {}
    for kind in KINDS.values():
        rows, rates, measured = by_method(here, "keep_rate", f"{kind}_AP")
        rows = [row for row in rows if row not in _DENSE]

        def expected(row: str, rate: float, kind: str = kind) -> Value | None:
            return printed_value(printed.value("detection", of_paper, training, row, rate, kind))

        text = f"{_of_dense(here, training, of_paper, kind, scale)} {_notes(here, scale)}"
        if not scale.is_miniature and (apart := disagreements(rows, rates, measured, expected)):
            text += f" {apart}."
        table = beside(rows, rates, measured, expected, comparable=not scale.is_miniature)
        found.append(Section(f"{prefix}{training}: {kind} AP", table, text.strip()))
        for rate in rates:
            if rate in scale.ranked:
                ranked[f"{kind} AP, {percent(rate)}"] = ranks(rows, rate, measured)
    if why := reasons(here):
        found[-1] = Section(found[-1].title, found[-1].table, f"{found[-1].text}\n\n{why}")
    columns = [Column("method", left=True), *(Column(head, "g") for head in ranked)]
    of_ranks = Table(columns, [[row, *(of_one.get(row) for of_one in ranked.values())] for row in rows])
    found.append(Section(f"{prefix}{training}: ranks", of_ranks, "Of means over seeds, 1 the best."))
    if by_words := {result["difference"]: result for result in results if "difference" in result}:

        def told(row: str, rate: float) -> str | None:
            return _intervals(by_words.get(to_dense_words(training, row, rate)))

        text = "Box and mask AP, with 95 % intervals over resampled images."
        found.append(Section(f"{prefix}{training}: difference to dense", plain_table(rows, rates, told), text))
    if training == SHELF:
        groups = grouped(here, "method", "keep_rate")
        dense = groups.get((DENSE, None))
        text = "" if not dense else f"Dense: {_gflops(dense)}."
        table = plain_table(rows, rates, lambda row, rate: _gflops(groups.get((row, rate))))
        found.append(Section(f"{prefix}GFLOPs of the backbone", table, text))
    return found


def _of_dense(results: Sequence[Result], training: str, model: str, kind: str, scale: DetectorScale) -> str:
    told = []
    for name in _DENSE:
        value = over_seeds([result for result in results if result["method"] == name], f"{kind}_AP")
        number = printed.value("detection", model, training, name, kind)
        beside_it = "" if number is None or scale.is_miniature else f" (printed: {number:.1f})"
        told += [] if value is None else [f"{name.capitalize()}: {value}{beside_it}."]
    return " ".join(told)


def _notes(results: Sequence[Result], scale: DetectorScale) -> str:
    seeds = len({result["seed"] for result in results})
    over = f"Mean over {seeds} seeds of training, in brackets the standard deviation."
    if seeds == 1:
        over = "One seed: nothing is known about the spread between trainings."
    if scale.is_miniature:
        return f"{over} Printed numbers are of ViT-Adapter-T on COCO: they cannot stand beside these."
    remarks = "; ".join(printed.table("detection")["remarks"])
    return f"{over} +- is one standard error, of our images and seeds. Of the printed numbers: {remarks}."


def ranks(rows: Sequence[str], rate: float, measured: Measured) -> dict[str, float]:
    """Rank means over seeds at one keep rate, among methods that can leave so few tokens; equals share theirs."""
    values = {row: measured(row, rate) for row in rows}
    able = {row: value.number for row, value in values.items() if isinstance(value, Value)}
    return dict(zip(able, map(float, rankdata([-number for number in able.values()])), strict=True))


def _intervals(found: Mapping[str, Any] | None) -> str | None:
    if found is None:
        return None
    return CANNOT if "cannot" in found else " / ".join(_with_interval(found[kind]) for kind in KINDS.values())


def _with_interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def _gflops(results: Sequence[Result] | None) -> str | None:
    if not results:
        return None
    return CANNOT if "cannot" in results[0] else f"{results[0]['gflops']:.3f}"


def _claims(results: Sequence[Result], prefix: str) -> list[Section]:
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
    """Draw AP by keep rate, one panel per model, training and kind that has a curve; none where nothing is ranked."""
    path.unlink(missing_ok=True)
    if any(result.get("training") == GATE and not passes(result) for result in results):
        return []
    panels = []
    measured = [result for result in results if result.get("training") in (SHELF, TUNED)]
    for (model, training), here in grouped(measured, "model", "training").items():
        by_name = grouped(here, "method")
        for kind in KINDS.values():
            curves = [curve_of(name, of_one, "keep_rate", f"{kind}_AP") for (name,), of_one in by_name.items()]
            curves = [replace(curve, y_error=None) for curve in curves if len(curve.x) > 1]
            dense = over_seeds(by_name.get((DENSE,), []), f"{kind}_AP")
            if curves and isinstance(dense, Value):
                title, label = f"{model}, {training}, {kind}", "keep rate at each stage"
                panels.append(CurvePanel(curves, label, f"{kind} AP", Level(dense.number), title, ticks_of(curves)))
    if not panels:
        return []
    draw_curves(panels, path)
    return [path]
