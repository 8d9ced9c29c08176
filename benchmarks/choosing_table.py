"""Which method, linkage and keep rate to choose, and what speed to expect: tables of docs/choosing.md.

    make choosing-page

Everything is read from benchmarks/results, where the studies put what they measured; nothing is measured here.
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

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "choosing.md"
LOSSES = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
RATES = (0.9, 0.7, 0.5, 0.25)
LINKAGES = ("atc average", "atc complete", "atc single")

Scores = Mapping[str, Mapping[float | None, float]]  # name -> keep rate -> score; dense under None


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def budgets(shelf: Mapping[str, Any]) -> str:
    """For each loss that may be tolerated, the cheapest of all that was measured, ATC and others apart."""
    results = [result for result in shelf["results"] if result["varies"] == "no"]
    dense = next(result for result in results if result["name"] == "dense")
    reduced = [result for result in results if result["keep_rate"] is not None]
    ours = [result for result in reduced if (result["method"] or "").startswith("atc")]
    others = [result for result in reduced if result not in ours]
    rows = []
    for loss in LOSSES:
        cells = [
            _cheapest([result for result in group if result["top1"] >= dense["top1"] - loss], dense)
            for group in (ours, others)
        ]
        rows.append([f"{loss:g}", *cells[0], *cells[1]])
    columns = [Column("points you may lose")]
    for group in ("cheapest ATC", "cheapest other"):
        columns += [Column(group, left=True), Column("top-1", ".1f"), Column("GFLOPs")]
    shelf_of = f"{shelf['model']['name']}, {shelf['data']['images']} ImageNet images, dense {dense['top1']:.1f} %"
    return f"{shelf_of}; {_when(reduced)}; GFLOPs of the dense ones.\n\n{Table(columns, rows).markdown()}"


def _cheapest(results: list[dict[str, Any]], dense: Mapping[str, Any]) -> list[Any]:
    """What to type, top-1 and share of GFLOPs; of equally cheap ones the most accurate."""
    if not results:
        return ["none", None, None]
    best = min(results, key=lambda result: (round(result["gflops"], 3), -result["top1"]))
    extra = "".join(f", {name} {best[name]}" for name in ("acts", "unread") if best.get(name))
    extra += ", proportional on" if best["proportional"] else ""
    return [f"`{best['method']}` at {best['keep_rate']:g}{extra}", best["top1"], f"{best['gflops'] / dense['gflops']:.0%}"]


def tasks() -> str:
    """Every task that was measured: the best method at each keep rate, and ATC and ToMe beside it."""
    rows = []
    for title, scores, lower_is_better in _tasks():
        dense = scores.get("dense", {}).get(None)
        for rate in RATES:
            at_rate = {name: by_rate[rate] for name, by_rate in scores.items() if rate in by_rate}
            if not at_rate:
                continue
            best = (min if lower_is_better else max)(at_rate, key=lambda name: at_rate[name])
            told = [f"{at_rate[name]:.1f}" if name in at_rate else CANNOT for name in (*LINKAGES, "tome")]
            rows.append([title, f"{dense:.1f}" if dense is not None else None, f"{rate:g}", best, f"{at_rate[best]:.1f}", *told])
            title, dense = "", None
    names = ("task", "dense", "keep rate", "best", "", "ATC average", "complete", "single", "ToMe")
    return Table([Column(name, left=name in ("task", "best")) for name in names], rows).markdown()


def _tasks() -> Iterable[tuple[str, Scores, bool]]:
    yield "DeiT-Tiny off the shelf, top-1", _named(load("off-the-shelf.json")["results"], "top1"), False
    for file, words in (("off-the-shelf", "off the shelf"), ("fine-tuned", "fine-tuned")):
        yield f"embedded classifier {words}, top-1", _named(load(f"mini-study/{file}.json")["results"], "top1"), False
    detection = load("mini-detection/record.json")["results"]
    for part in ("off the shelf", "fine-tuned"):
        chosen = _of_finished_seeds([result for result in detection if result["part"] == part])
        yield f"embedded detector {part}, box AP", _named(chosen, "box_AP"), False
    yield "nuclei, off the shelf, box AP", _named(load("real-detection/nuclei.json")["reduced"], "box_AP"), False
    yield "embedded generator, error of a prediction in %", _errors(load("mini-synthesis/errors.json")["rows"]), True


def _of_finished_seeds(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A seed of which some methods are missing would not compare like with like."""
    by_seed = {seed: [result for result in results if result["seed"] == seed] for seed in {r["seed"] for r in results}}
    most = max(map(len, by_seed.values()))
    return [result for found in by_seed.values() if len(found) == most for result in found]


def _named(results: Iterable[Mapping[str, Any]], score: str) -> Scores:
    """Scores by name and keep rate, mean over seeds; only methods as their authors have them."""
    found: dict[str, dict[float | None, list[float]]] = {}
    for result in results:
        changed = any(result.get(name) for name in ("acts", "unread", "proportional"))
        if score in result and result["name"] != "one token" and not changed and "=" not in result["name"]:
            found.setdefault(result["name"], {}).setdefault(result["keep_rate"], []).append(result[score])
    return {name: {rate: mean(values) for rate, values in by_rate.items()} for name, by_rate in found.items()}


def _errors(rows: Iterable[Mapping[str, Any]]) -> Scores:
    found: dict[str, dict[float | None, float]] = {}
    for row in rows:
        name, _, rate = row["cell"].rpartition("_keep")
        found.setdefault(name.replace("-", " ") if name in ("atc-average", "atc-complete", "atc-single") else name, {})[
            float(rate)
        ] = 100 * row["error"]
    return found


def speeds() -> str:
    """What was timed on a CPU: how many times as fast, beside the share of multiply-adds that is left."""
    rows: list[list[Any]] = []
    for file in ("model.json", "model-batch16.json"):
        record = load(file)
        dense = next(result for result in record["results"] if result["name"] == "dense")
        for result in record["results"]:
            if result["keep_rate"] not in (None, 1.0) and result["name"] != "free":
                what = f"DeiT-Tiny, batches of {record['settings']['batch_size']}"
                rows.append([what, result["name"], result["keep_rate"], result["gflops"] / dense["gflops"], result["to_dense"]])
    adapter = load("adapter.json")
    backbone = adapter["results"][0]["gflops"]
    what = f"detector's backbone, {adapter['tokens']} tokens"
    for result in adapter["results"][1:]:
        rows.append([what, result["name"], result["keep_rate"], result["gflops"] / backbone, 1 / result["to_dense"]["all"]])
    diffusion = load("diffusion.json")
    for result in summaries(diffusion):
        if result["keep_rate"] is not None and result["name"] in ("tomesd", "atc", "atc, windows of 16, kept for 5 steps"):
            what = f"Stable Diffusion 1.5's U-Net, {diffusion['tokens']} tokens"
            rows.append([what, result["name"], result["keep_rate"], None, 1 / result["to_dense"]])
    for row in load("mini-synthesis/times.json")["rows"]:
        name, _, rate = row["cell"].rpartition("_keep")
        if name in ("tome", "atc-average") and float(rate) in (0.7, 0.5):
            rows.append(["embedded generator, 256 tokens", name.replace("-", " "), float(rate), None, 1 / row["of_dense"]])
    shown = []
    before = ""
    for what, name, rate, share, times in rows:
        left = None if share is None else f"{share:.0%}"
        shown.append(["" if what == before else what, name, f"{rate:g}", left, f"{times:.2f}x"])
        before = what
    columns = [Column("what", left=True), Column("method", left=True), Column("keep rate"), Column("GFLOPs left")]
    machine = load("model.json")["machine"]
    head = f"{machine['cpu']}, {machine['threads']} threads, float32, {machine['date'][:10]}; times as fast as the dense model."
    return f"{head}\n\n{Table([*columns, Column('speed')], shown).markdown()}"


def _when(results: Iterable[Mapping[str, Any]]) -> str:
    found = list(results)
    processors = sorted({result["processor"] for result in found if result.get("processor")})
    return f"{' and '.join(processors)}, {' and '.join(sorted({result['date'][:10] for result in found}))}"


def page(text: str) -> str:
    """The page with all its tables written anew."""
    for name, table in (("budgets", budgets(load("off-the-shelf.json"))), ("tasks", tasks()), ("speeds", speeds())):
        text = replace_between_marks(text, name, table)
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
