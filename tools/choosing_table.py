"""Which method, linkage and keep rate to choose, and what speed to expect: tables of docs/choosing.md.

    make choosing-page

Everything is read from what the studies recorded; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from agglo.bench.diffusion_report import summaries
from agglo.experiments.tables import CANNOT, Column, Table
from benchmarks.marks import replace_between_marks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "choosing.md"
FOLDERS = ("results", "benchmarks/results")  # where records lie: those of `agglo reproduce`, and those of scripts
LOSSES = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
RATES = (0.9, 0.7, 0.5, 0.25)
ATC = ("atc average", "atc complete", "atc single")
OFF_THE_SHELF = ("off-the-shelf/record.json", "better-atc/record.json", "off-the-shelf.json")
MINIATURE = {
    "off the shelf": ("miniature/off-the-shelf/record.json", "mini-study/off-the-shelf.json"),
    "fine-tuned": ("miniature/fine-tuned/record.json", "mini-study/fine-tuned.json"),
}

Result = dict[str, Any]
Scores = Mapping[str, Mapping[float | None, float]]  # name -> keep rate -> score; dense under None


def records(names: Iterable[str]) -> list[dict[str, Any]]:
    """Those of the files that are there."""
    paths = [ROOT / folder / name for name in names for folder in FOLDERS]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    if not found:
        raise ValueError(f"no record of {', '.join(names)} in {' or '.join(FOLDERS)}")
    return found


def results(names: Iterable[str]) -> list[Result]:
    """What was measured, each with its `name` and, as `typed`, what a person would type for it."""
    found = [result for record in records(names) for result in record.get("results") or record["reduced"]]
    return [_told(result) for result in found if "cannot" not in result and "difference" not in result]


def _told(result: Mapping[str, Any]) -> Result:
    """Records of `agglo reproduce` name a method in words and say as `reduction` what was applied; those of
    `agglo evaluate` have the two as `name` and `method`, and some options apart."""
    if isinstance(result.get("cell"), dict):
        name, typed, changed = result["method"], result.get("reduction") or "", False
    else:
        name, typed = result["name"], result.get("method") or ""
        extra = [f"{what} {result[what]}" for what in ("acts", "unread") if result.get(what)]
        extra += ["proportional attention on"] if result.get("proportional") else []
        typed, changed = ", ".join([typed, *extra]), bool(extra)
    usual = not changed and "=" not in name and "," not in name and "as released" not in name
    return {**result, "name": name, "typed": typed, "usual": usual and name != "one token"}


def budgets() -> str:
    """For each loss that may be tolerated, the cheapest of all that was measured, ATC and others apart."""
    measured = [result for result in results(OFF_THE_SHELF) if result.get("varies", "no") == "no"]
    dense = next(result for result in measured if result["name"] == "dense")
    reduced = [result for result in measured if result["keep_rate"] is not None]
    ours = [result for result in reduced if result["name"].startswith("atc")]
    others = [result for result in reduced if result not in ours]
    rows = []
    for loss in LOSSES:
        within = [[one for one in group if one["top1"] >= dense["top1"] - loss] for group in (ours, others)]
        rows.append([f"{loss:g}", *_cheapest(within[0], dense), *_cheapest(within[1], dense)])
    columns = [Column("points you may lose")]
    for group in ("cheapest ATC", "cheapest other"):
        columns += [Column(group, left=True), Column("top-1", ".1f"), Column("GFLOPs")]
    processors = sorted({result["processor"] for result in reduced})
    dates = sorted({result["date"][:10] for result in reduced})
    head = (
        f"DeiT-Tiny, {dense['images']} ImageNet images, dense {dense['top1']:.1f} %; {' and '.join(processors)}, "
        f"{' and '.join(dates)}; GFLOPs of the dense model's."
    )
    return f"{head}\n\n{Table(columns, rows).markdown()}"


def _cheapest(found: list[Result], dense: Result) -> list[Any]:
    """What to type, top-1 and share of GFLOPs; of equally cheap ones the most accurate."""
    if not found:
        return ["none", None, None]
    best = min(found, key=lambda result: (round(result["gflops"], 3), -result["top1"]))
    typed, _, extra = best["typed"].partition(", ")
    words = f"`{typed}` at {best['keep_rate']:g}{f', {extra}' if extra else ''}"
    return [words, best["top1"], f"{best['gflops'] / dense['gflops']:.0%}"]


def tasks() -> str:
    """Every task that was measured: the best method at each keep rate, and ATC and ToMe beside it."""
    rows = []
    for title, scores, lower_is_better in _tasks():
        dense = scores.get("dense", {}).get(None)
        for rate in RATES:
            here = {name: by_rate[rate] for name, by_rate in scores.items() if rate in by_rate}
            if not here:
                continue
            best = (min if lower_is_better else max)(here, key=lambda name, here=here: here[name])
            beside = [f"{here[name]:.1f}" if name in here else CANNOT for name in (*ATC, "tome")]
            told = None if dense is None else f"{dense:.1f}"
            rows.append([title, told, f"{rate:g}", best, f"{here[best]:.1f}", *beside])
            title, dense = "", None
    names = ("task", "dense", "keep rate", "best", "", "ATC average", "complete", "single", "ToMe")
    return Table([Column(name, left=name in ("task", "best")) for name in names], rows).markdown()


def _tasks() -> Iterable[tuple[str, Scores, bool]]:
    """Title, scores, and whether lower ones are better."""
    yield "DeiT-Tiny off the shelf, top-1", _scores(results(OFF_THE_SHELF), "top1"), False
    for words, names in MINIATURE.items():
        yield f"embedded classifier {words}, top-1", _scores(_of_finished_seeds(results(names)), "top1"), False
    detection = results(["miniature/detection/record.json", "mini-detection/record.json"])
    for part in ("off the shelf", "fine-tuned"):
        of_part = [one for one in detection if one.get("training", one.get("part")) == part]
        chosen = _of_finished_seeds(of_part)
        yield f"embedded detector {part}, box AP", _scores(chosen, "box_AP"), False
    nuclei = results(["nuclei/record.json", "real-detection/nuclei.json"])
    yield "nuclei, off the shelf, box AP", _scores(nuclei, "box_AP"), False
    errors: dict[str, dict[float | None, float]] = {}
    for name, rate, row in _of_generator("prediction", "mini-synthesis/errors.json"):
        errors.setdefault(name, {})[rate] = 100 * row["error"]
    yield "embedded generator, error of a prediction in %", errors, True


def _of_finished_seeds(found: list[Result]) -> list[Result]:
    """A seed of which some methods are missing would not compare like with like."""
    seeds = {one.get("seed") for one in found}
    by_seed = {seed: [one for one in found if one.get("seed") == seed] for seed in seeds}
    most = max(map(len, by_seed.values()))
    return [one for results_ in by_seed.values() if len(results_) == most for one in results_]


def _scores(found: Iterable[Result], score: str) -> Scores:
    """By name and keep rate, mean over seeds; only methods as their authors have them."""
    values: dict[str, dict[float | None, list[float]]] = {}
    for one in found:
        if one["usual"] and score in one:
            values.setdefault(one["name"], {}).setdefault(one["keep_rate"], []).append(one[score])
    return {name: {rate: mean(of_rate) for rate, of_rate in rates.items()} for name, rates in values.items()}


def _of_generator(part: str, file: str) -> Iterable[tuple[str, float, Result]]:
    """Name, keep rate and row of what was measured on the embedded generator; the dense one is left out."""
    record = records(["miniature/diffusion-options/record.json", file])[0]
    rows = record.get("rows") or [result for result in record["results"] if result["part"] == part]
    for row in rows[0].get("rows", rows):
        name, rate = row.get("method"), row.get("keep_rate")
        if isinstance(row.get("cell"), str):
            name, _, rate = row["cell"].rpartition("_keep")
        if name and rate:
            plain = name.replace("-", " ")
            yield (plain if plain in ATC else name), float(rate), row


def speeds() -> str:
    """What was timed on a CPU: how many times as fast, beside the share of multiply-adds that is left."""
    rows: list[tuple[str, str, float, float | None, float]] = []
    for name in ("model.json", "model-batch16.json"):
        record = records([f"bench/{name}", name])[0]
        dense = next(result for result in record["results"] if result["name"] == "dense")["gflops"]
        what = f"DeiT-Tiny, batches of {record['settings']['batch_size']}"
        for one in record["results"]:
            if one["keep_rate"] not in (None, 1.0) and one["name"] != "free":
                rows.append((what, one["name"], one["keep_rate"], one["gflops"] / dense, one["to_dense"]))
    adapter = records(["bench/adapter.json", "adapter.json"])[0]
    what, dense = f"detector's backbone, {adapter['tokens']} tokens", adapter["results"][0]["gflops"]
    for one in adapter["results"][1:]:
        rows.append((what, one["name"], one["keep_rate"], one["gflops"] / dense, 1 / one["to_dense"]["all"]))
    diffusion = records(["bench/diffusion.json", "diffusion.json"])[0]
    what = f"Stable Diffusion 1.5's U-Net, {diffusion['tokens']} tokens"
    for one in summaries(diffusion):
        if one["keep_rate"] and one["name"] in ("tomesd", "atc", "atc, windows of 16, kept for 5 steps"):
            rows.append((what, one["name"], one["keep_rate"], None, 1 / one["to_dense"]))
    for name, rate, row in _of_generator("time", "mini-synthesis/times.json"):
        if name in ("tome", "atc average") and rate in (0.7, 0.5):
            rows.append(("embedded generator, 256 tokens", name, rate, None, 1 / row["of_dense"]))
    shown, before = [], ""
    for what, name, rate, share, times in rows:
        left = None if share is None else f"{share:.0%}"
        shown.append(["" if what == before else what, name, f"{rate:g}", left, f"{times:.2f}x"])
        before = what
    columns = [Column("what", left=True), Column("method", left=True), Column("keep rate"), Column("GFLOPs left")]
    machine = records(["bench/model.json", "model.json"])[0]["machine"]
    head = f"{machine['cpu']}, {machine['threads']} threads, float32, {machine['date'][:10]}; against the dense model."
    return f"{head}\n\n{Table([*columns, Column('speed')], shown).markdown()}"


def page(text: str) -> str:
    """The page with all its tables written anew."""
    for name, table in (("budgets", budgets), ("tasks", tasks), ("speeds", speeds)):
        text = replace_between_marks(text, name, table())
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
