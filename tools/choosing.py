"""Which method, linkage and keep rate to choose, and what speed to expect: tables of README.md and docs/choosing.md.

Everything is read from what `agglo reproduce` and `agglo bench` recorded; nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from agglo.config import ReductionConfig
from agglo.lab.bench import where
from agglo.lab.bench.diffusion import SD15, summaries
from agglo.lab.bench.model import run_of
from agglo.lab.evaluation.configs import budget_of
from agglo.lab.paper.compare import grouped
from agglo.text import format_call
from agglo.utils.tables import CANNOT, Column, Table

RESULTS = Path(__file__).parents[1] / "results"
LOSSES = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
RATES = (0.9, 0.7, 0.5, 0.25)
ATC = ("atc average", "atc complete", "atc single")
OFF_THE_SHELF = ("off-the-shelf/record.json", "better-atc/record.json")
MINIATURE = {"off the shelf": "miniature/off-the-shelf/record.json", "fine-tuned": "miniature/fine-tuned/record.json"}
_VARIED = ("=", ",", "as released")  # in names of methods with options
SYNTHESIS = "miniature/diffusion-options/record.json"

Result = dict[str, Any]
Scores = Mapping[tuple[str, float | None], float]  # by name and keep rate; dense under None


def record(name: str) -> dict[str, Any]:
    path = RESULTS / name
    if not path.is_file():
        raise ValueError(f"there is no record {name!r} in {RESULTS.name}/: a command that `make help` lists makes it")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def results(*names: str) -> list[Result]:
    """Return what was measured, without what could not run."""
    return [result for name in names for result in record(name)["results"] if "cannot" not in result]


def budgets() -> str:
    """Return the cheapest reduction within each tolerated loss of accuracy, of ATC and of the other methods."""
    measured = [result for result in results(*OFF_THE_SHELF) if result.get("varies", "no") == "no"]
    dense = next(result for result in measured if result["method"] == "dense")
    reduced = [result for result in measured if result["keep_rate"] is not None]
    ours = [result for result in reduced if result["method"].startswith("atc")]
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
    """Return what to type, top-1 and fraction of GFLOPs of the cheapest; of equally cheap ones the most accurate."""
    if not found:
        return ["none", None, None]
    best = min(found, key=lambda result: (round(result["gflops"], 3), -result["top1"]))
    config = ReductionConfig.from_dict(best["config"])
    how = {name: value for name, value in config.given().items() if name != "keep_rate"}
    words = f"`{format_call(config.method, (), how)}` at {best['keep_rate']:g}"
    return [words, best["top1"], f"{best['gflops'] / dense['gflops']:.0%}"]


def tasks() -> str:
    """Return the best method of every task at each keep rate, and ATC and ToMe."""
    rows = []
    for title, scores, lower_is_better in _tasks():
        dense = scores.get(("dense", None))
        for rate in RATES:
            here = {name: score for (name, other), score in scores.items() if other == rate}
            if not here:
                continue
            best = (min if lower_is_better else max)(here, key=lambda name, here=here: here[name])
            others = [f"{here[name]:.1f}" if name in here else CANNOT for name in (*ATC, "tome")]
            level = sum(f"{score:.1f}" == f"{here[best]:.1f}" for score in here.values()) - 1
            named = f"{best}, {level} level with it" if level else best
            rows.append([title, dense and f"{dense:.1f}", f"{rate:g}", named, f"{here[best]:.1f}", *others])
            title, dense = "", None
    names = ("task", "dense", "keep rate", "best", "", "ATC average", "complete", "single", "ToMe")
    return Table([Column(name, left=name in ("task", "best")) for name in names], rows).markdown()


def _tasks() -> Iterable[tuple[str, Scores, bool]]:
    """Yield title, scores, and whether lower ones are better."""
    yield "DeiT-Tiny off the shelf, top-1", _scores(results(*OFF_THE_SHELF), "top1"), False
    for words, name in MINIATURE.items():
        yield f"embedded classifier {words}, top-1", _scores(_of_finished_seeds(results(name)), "top1"), False
    detection = [one for one in results("miniature/detection/record.json") if "training" in one and "box_AP" in one]
    for part in ("off the shelf", "fine-tuned"):
        chosen = _of_finished_seeds([one for one in detection if one["training"] == part])
        yield f"embedded detector {part}, box AP", _scores(chosen, "box_AP"), False
    nuclei = [one for one in results("nuclei/record.json") if one["part"] == "reduced"]
    yield "nuclei, off the shelf, box AP", _scores(nuclei, "box_AP"), False
    predictions = [one for one in results(SYNTHESIS) if one["part"] == "prediction"]
    spelt = {name.replace(" ", "-"): name for name in ATC}  # other studies write ATC's linkages with a space
    errors = [{**p, "method": spelt.get(p["method"], p["method"]), "percent": 100 * p["error"]} for p in predictions]
    yield "embedded generator, error of a prediction in %", _scores(errors, "percent"), True


def _of_finished_seeds(found: list[Result]) -> list[Result]:
    """Leave out seeds of which some methods are missing, which would not compare like with like."""
    by_seed = grouped(found, "seed").values()
    most = max(map(len, by_seed))
    return [one for of_seed in by_seed if len(of_seed) == most for one in of_seed]


def _scores(found: Iterable[Result], score: str) -> Scores:
    """Return the mean over seeds by name and keep rate, of methods without options, so as their authors have them."""
    plain = [one for one in found if score in one and not any(part in one["method"] for part in _VARIED)]
    groups = grouped([one for one in plain if one["method"] != "one token"], "method", "keep_rate")
    return {key: mean(one[score] for one in here) for key, here in groups.items()}


def speeds() -> str:
    """Return how many times as fast models ran on a CPU, and the fraction of multiply-adds that is left."""
    rows: list[tuple[str, str, str, float | None, float]] = []
    timed = record("bench/model.json")
    for batch_size in BATCHES:
        found = run_of(timed, batch_size)["results"]
        dense = next(one for one in found if one["name"] == "dense")["gflops"]
        what = f"DeiT-Tiny, batches of {batch_size}" if batch_size > 1 else "DeiT-Tiny, one image"
        for one in found:
            budget = budget_of(one)
            if budget not in ("", "keep 1") and one["name"] != "free":
                rows.append((what, one["name"], budget, one["gflops"] / dense, one["to_dense"]))
    adapter = record("bench/adapter.json")
    what, dense = f"detector's backbone, {adapter['tokens']} tokens", adapter["results"][0]["gflops"]
    for one in adapter["results"][1:]:
        budget, times = f"keep {one['keep_rate']:g}", 1 / one["to_dense"]["all"]
        rows.append((what, one["name"], budget, one["gflops"] / dense, times))
    runs = record("bench/diffusion.json")["runs"]
    diffusion = next(run for run in runs if run["settings"]["architecture"] == SD15)
    what = f"Stable Diffusion 1.5's U-Net, {diffusion['tokens']} tokens"
    for one in summaries(diffusion):
        if one["keep_rate"] and one["name"] in ("tomesd", "atc", "atc, kept for 5 steps"):
            rows.append((what, one["name"], f"keep {one['keep_rate']:g}", None, 1 / one["to_dense"]))
    shown, before = [], ""
    for what, name, budget, share, times in rows:
        left = None if share is None else f"{share:.0%}"
        shown.append(["" if what == before else what, name, budget, left, f"{times:.2f}x"])
        before = what
    columns = [Column("what", left=True), Column("method", left=True), Column("budget"), Column("GFLOPs left")]
    head = f"{where(run_of(record('bench/model.json')))}, float32; against the dense model."
    return f"{head}\n\n{Table([*columns, Column('speed')], shown).markdown()}"


BATCHES = (1, 64)
RECIPE = "recipe/record.json"
README_MODEL = "deit_tiny_patch16_224"


def readme() -> str:
    """Return the README's table: top-1 of `agglo reproduce off-the-shelf` beside speeds of `agglo bench model`.

    The dense model also runs a few images at a time, as all reduced ones do ("free" at keep rate 1: nothing is merged).
    """
    timed = record("bench/model.json")
    runs = [run_of(timed, batch_size)["results"] for batch_size in BATCHES]
    speeds = [{(one["name"], budget_of(one)): one["to_dense"] for one in run} for run in runs]
    here = [one for one in results(OFF_THE_SHELF[0]) if (one["model"], one["data"]) == (README_MODEL, "imagenet")]
    top1 = {(one["method"], one["keep_rate"]): one["top1"] for one in here}
    dense = top1["dense", None]
    recipes = [one for one in results(RECIPE) if (one["model"], one["method"]) == (README_MODEL, "recipe")]
    lost = {one["flops"]: 100 * (one["quality"]["lost"] - one["quality"]["gained"]) / one["images"] for one in recipes}

    def row(title: str, accuracy: float, *timed_as: str) -> list[Any]:
        return [title, accuracy, *(f"{run[timed_as]:.2f}x" for run in speeds)]

    rows = [row("dense", dense, "dense", ""), row("dense, a few images at a time", dense, "free", "keep 1")]
    for name, shown in {"tome": "ToMe, keep rate 0.5", "atc average": "the paper's ATC, keep rate 0.5"}.items():
        rows.append(row(shown, top1[name, 0.5], name, "keep 0.5"))
    rows.append(row("`agglo.apply(model, flops=0.5)`", dense - lost[0.5], "atc average", "flops 0.5"))
    columns = [Column("DeiT-Tiny, off the shelf", left=True), Column("top-1", ".1f")]
    columns += [Column(f"speed, batch {batch_size}") for batch_size in BATCHES]
    about = (
        f"{here[0]['images']} ImageNet images (`make off-the-shelf`, `make recipe`); speed against timm's dense model, "
        f"{where(run_of(timed))} (`make bench-model`)."
    )
    return f"{Table(columns, rows).markdown()}\n\n{about}"
