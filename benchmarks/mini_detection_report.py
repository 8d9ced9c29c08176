"""The detection in miniature as tables, from its record alone: the gate, AP, ranks, and what agrees with the study.

python -m benchmarks.mini_detection_report
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import rankdata

from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.experiments.tables import CANNOT, Column, Table
from benchmarks.marks import replace_between_marks
from benchmarks.mini_detection_plan import DENSE, RANKED, SHELF, TUNED
from benchmarks.mini_detection_record import BESIDES, CLAIMS, Claim, complete_seeds, planned, to_dense

RESULTS = Path(__file__).parent / "results" / "mini-detection"
PAGE = Path(__file__).parents[1] / "docs" / "mini-detection.md"
MARK = "detection"
KINDS = ("box", "mask")
_PLACE = f"\n<!-- {MARK}: make mini-detection-page -->\n<!-- end of {MARK} -->\n"
_PICTURE = "ap.png"

Content = Mapping[str, Any]
Values = dict[str, dict[float | None, list[float] | None]]


def text(content: Content) -> str:
    """What the page says. Without a passed gate no method is told from another: it would be chance."""
    parts = [_head(content), _gate(content)]
    if not is_ranked(content):
        return "\n\n".join([*parts, "**Not ranked**: the gate is not passed by every seed."])
    for part in (SHELF, TUNED):
        parts += _part(content, part)
    return "\n\n".join([*parts, *_statements(content)])


def is_ranked(content: Content) -> bool:
    """Whether the gate is passed, by every seed that came to it."""
    return bool(content["gate"]) and all(each["passed"] for each in content["gate"])


def _head(content: Content) -> str:
    settings, machine = content["settings"], content["machine"]
    processors = " and ".join(sorted({each["processor"] for each in content["results"]}))
    return (
        f"({processors}, {machine['date'][:10]}; dense: {settings['epochs']} epochs of {settings['scenes']} scenes; "
        f"fine-tuned: {settings['tuning_epochs']} more of {settings['tuning_scenes']}; judged by "
        f"{settings['validation']} scenes)"
    )


def _gate(content: Content) -> str:
    """What a single token costs each dense detector."""
    columns = [Column("seed")]
    for kind in KINDS:
        columns += [Column(f"{kind} AP, dense", ".1f"), Column("one token", ".1f"), Column("lost", left=True)]
    rows = []
    for each in content["gate"]:
        row: list[Any] = [each["seed"]]
        for kind in KINDS:
            found = each[kind]
            share = f"{found['lost']:.0%} [{found['low']:.0%}, {found['high']:.0%}]"
            row += [found["dense"], found["one token"], share]
        rows.append([*row, "passed" if each["passed"] else "not passed"])
    table = Table([*columns, Column("gate", left=True)], rows).markdown()
    return f"The gate: all tokens collapsed to one must cost a third of the dense AP.\n\n{table}"


def values(content: Content, part: str, kind: str) -> Values:
    """AP by name and keep rate, one for each complete seed; None where the method cannot leave so few tokens."""
    seeds = complete_seeds(content, part)
    found: Values = {}
    for name, rate in planned(content, part):
        of_cell = [
            next(
                each
                for each in content["results"]
                if (each["part"], each["seed"], each["name"], each["keep_rate"]) == (part, seed, name, rate)
            )
            for seed in seeds
        ]
        cannot = any("cannot" in each for each in of_cell)
        found.setdefault(name, {})[rate] = None if cannot else [each[f"{kind}_AP"] for each in of_cell]
    return found


def _part(content: Content, part: str) -> list[str]:
    seeds = complete_seeds(content, part)
    title = f"### {part.capitalize()}"
    if part == TUNED and not content["plan"]["tuned_rates"]:
        return [title, "Not run yet: the same command with `--tuned-keep-rate 0.5 0.25` adds it."]
    if not seeds:
        return [title, "Unfinished: no seed has all of its cells yet."]
    unfinished = sorted(set(range(content["plan"]["seeds"])) - set(seeds))
    note = f" Not finished, and left out: seed {', '.join(map(str, unfinished))}." if unfinished else ""
    told = [title, f"{_over(seeds)}.{note} Ranks are of means over seeds, 1 the best."]
    for kind in KINDS:
        found = values(content, part, kind)
        dense = found.pop(DENSE.name)[None]
        assert dense is not None
        told.append(f"{kind.capitalize()} AP; dense {_spread(dense)}")
        told.append(_ap_table(found))
    told += [
        "Difference to dense, box and mask AP, with 95 % intervals over resampled scenes",
        _to_dense(content, part),
    ]
    if part == SHELF:
        told += ["GFLOPs of the backbone", _gflops(content)]
    return told


def _over(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return "One seed: nothing is known about the spread between trainings"
    return f"Mean ± standard deviation over {len(seeds)} seeds of training"


def _spread(found: Sequence[float]) -> str:
    return f"{mean(found):.1f}" if len(found) < 2 else f"{mean(found):.1f} ± {stdev(found):.1f}"


def _rates(found: Values) -> list[float]:
    return sorted({rate for row in found.values() for rate in row if rate is not None})


def ranks(found: Values, rate: float) -> dict[str, float]:
    """Of the means over seeds at one keep rate, among those that can leave so few tokens; equals share theirs."""
    able = {name: mean(row[rate] or ()) for name, row in found.items() if row.get(rate) is not None}
    return dict(zip(able, map(float, rankdata([-value for value in able.values()])), strict=True))


def _ap_table(found: Values) -> str:
    rates = _rates(found)
    ranked = {rate: ranks(found, rate) for rate in rates if rate in RANKED}
    columns = [Column("keep rate", left=True), *(Column(f"{rate:.0%}") for rate in rates)]
    columns += [Column(f"rank {rate:.0%}", "g") for rate in ranked]
    rows = [
        [
            name,
            *(CANNOT if row[rate] is None else _spread(row[rate] or ()) for rate in rates),
            *(ranked[rate].get(name) for rate in ranked),
        ]
        for name, row in found.items()
    ]
    return Table(columns, rows).markdown()


def _to_dense(content: Content, part: str) -> str:
    by_words = {each["words"]: each for each in content["differences"]}

    def told(name: str, rate: float) -> str:
        found = by_words.get(to_dense(part, name, rate))
        return CANNOT if found is None else " / ".join(_with_interval(found[kind]) for kind in KINDS)

    names = list(dict.fromkeys(name for name, rate in planned(content, part) if rate is not None))
    return _by_rate(names, [rate for rate in RANKED if rate in _rates(values(content, part, "box"))], told)


def _gflops(content: Content) -> str:
    first = {
        (each["name"], each["keep_rate"]): each.get("gflops") for each in content["results"] if each["part"] == SHELF
    }
    names = list(dict.fromkeys(name for name, rate in planned(content, SHELF) if rate is not None))
    rates = sorted(content["plan"]["shelf_rates"])
    dense = first[DENSE.name, None]
    table = _by_rate(
        names, rates, lambda name, rate: CANNOT if first[name, rate] is None else f"{first[name, rate]:.3f}"
    )
    return f"{table}\n\n(dense {dense:.3f})"


def _by_rate(names: Sequence[str], rates: Sequence[float], told: Callable[[str, float], str]) -> str:
    columns = [Column("keep rate", left=True), *(Column(f"{rate:.0%}") for rate in rates)]
    return Table(columns, [[name, *(told(name, rate) for rate in rates)] for name in names]).markdown()


def _with_interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def verdict(found: Mapping[str, Any]) -> str:
    """What two intervals say about a claim that both differences are above 0."""
    if all(found[kind]["low"] > 0 for kind in KINDS):
        return "agrees"
    if all(found[kind]["high"] < 0 for kind in KINDS):
        return "the other way round"
    if any(found[kind]["low"] > 0 for kind in KINDS) and any(found[kind]["high"] < 0 for kind in KINDS):
        return "boxes and masks disagree"
    one_sided = [kind for kind in KINDS if found[kind]["low"] > 0 or found[kind]["high"] < 0]
    if one_sided:
        [kind] = one_sided
        return f"only {kind} AP: {'agrees' if found[kind]['low'] > 0 else 'the other way round'}"
    return "undecided"


def _statements(content: Content) -> list[str]:
    told = ["### What agrees with the study, and what does not"]
    told.append(
        "Each line holds in the study's table for both detectors, for boxes and for masks. Differences are of means "
        "over seeds, in points of AP, with 95 % intervals over resampled scenes; training again moves them too."
    )
    told.append(_claims(content, CLAIMS, verdicts=True))
    told.append("Not in the study's table, or there at keep rates that are not ranked here:")
    told.append(_claims(content, BESIDES, verdicts=False))
    return told


def _claims(content: Content, claims: Sequence[Claim], *, verdicts: bool) -> str:
    by_words = {each["words"]: each for each in content["differences"]}
    columns = [Column("difference" if not verdicts else "in the study", left=True), Column("box AP"), Column("mask AP")]
    columns += [Column("seeds", left=True)] + ([Column("here", left=True)] if verdicts else [])
    rows = []
    rates = {SHELF: content["plan"]["shelf_rates"], TUNED: content["plan"]["tuned_rates"]}
    for claim in claims:
        if any(not rates[term.part] or term.rate not in (None, *rates[term.part]) for term in claim.terms):
            continue  # not planned
        found = by_words.get(claim.words)
        if found is None:
            rows.append([claim.words, None, None, "unfinished", *([None] if verdicts else [])])
            continue
        row = [claim.words, *(_with_interval(found[kind]) for kind in KINDS), _by_seed(found)]
        rows.append([*row, verdict(found)] if verdicts else row)
    return Table(columns, rows).markdown()


def _by_seed(found: Mapping[str, Any]) -> str:
    """The difference in box AP of each seed: one number is no spread, but its sign is something."""
    return ", ".join(f"{value:+.1f}" for value in found["box"]["by_seed"])


def write(folder: Path) -> None:
    """The picture beside the record; none where nothing is ranked."""
    content = load(folder / "record.json")
    (folder / _PICTURE).unlink(missing_ok=True)
    parts = [part for part in (SHELF, TUNED) if complete_seeds(content, part)]
    if not is_ranked(content) or not parts:
        return
    panels = []
    for part in parts:
        for kind in KINDS:
            found = values(content, part, kind)
            dense = mean(found.pop(DENSE.name)[None] or ())
            if len(_rates(found)) < 2:
                continue  # no curve; the tables have it
            curves = []
            for name, row in found.items():
                at = [rate for rate in _rates(found) if row.get(rate) is not None]
                curves.append(Curve(name, at, [mean(row[rate] or ()) for rate in at]))
            title, label = f"{part}, {kind}", "keep rate at each stage"
            panels.append(CurvePanel(curves, label, f"{kind} AP", Level(dense), title, x_ticks=_rates(found)))
    draw_curves(panels, folder / _PICTURE)


def with_tables(page: str, content: Content) -> str:
    """A page with the tables of a record; at its end if it has no place for them yet."""
    return replace_between_marks(page if has_place(page) else page + _PLACE, MARK, text(content))


def has_place(page: str) -> bool:
    return f"<!-- {MARK}:" in page


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_page() -> None:
    page = with_tables(PAGE.read_text(encoding="utf-8"), load(RESULTS / "record.json"))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write(RESULTS)
    write_page()
