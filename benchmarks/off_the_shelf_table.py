"""The off-the-shelf results and the model's speed as tables, written into docs/off-the-shelf.md.

make off-the-shelf CHECKPOINT=deit_tiny_patch16_224.safetensors IMAGES=imagenet
make better-atc CHECKPOINT=deit_tiny_patch16_224.safetensors IMAGES=imagenet
make bench-model CHECKPOINT=deit_tiny_patch16_224.safetensors
make off-the-shelf-page
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.bench.model_report import table as speed_table
from agglo.drawing.colours import in_order
from agglo.experiments.tables import CANNOT, Column, Table
from benchmarks.marks import write_between_marks

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "off-the-shelf.md"


def label(result: dict[str, Any]) -> str:
    """The name, with the weights that K-Medoids and DPC-KNN were asked to use, and the attention if not their own."""
    method = result["method"] or ""
    weights = ", equal weights" if "weights=equal" in method else ", attention weights" if method == "kmedoids" else ""
    proportional = ", proportional attention" if result["proportional"] else ""
    before = ", before block" if result.get("acts") == "before block" else ""
    dropped = ", unread patches dropped" if result.get("unread") == "drop" else ""
    return f"{result['name']}{weights}{proportional}{before}{dropped}"


def is_beyond_the_paper(result: dict[str, Any]) -> bool:
    """Whether a result is of atc with one of the options that the paper does not have."""
    method = result["method"] or ""
    beyond = any(f"{option}=" in method for option in ("importance", "mean", "features"))
    return method.startswith("atc") and (beyond or "acts" in result or "unread" in result)


def table(results: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    rates = sorted({result["keep_rate"] for result in results} - {None}, reverse=True)
    rows = []
    for name in in_order(label(result) for result in results if result["keep_rate"] is not None):
        found = {result["keep_rate"]: result for result in results if label(result) == name}
        rows.append([name, *(text(found.get(rate), cell) for rate in rates)])
    return Table([Column("method", left=True), *(Column(f"{rate:.0%}") for rate in rates)], rows).markdown()


def text(result: dict[str, Any] | None, cell: Callable[[dict[str, Any]], str]) -> str:
    return "not run" if result is None else CANNOT if "cannot" in result else cell(result)


def tokens(result: dict[str, Any]) -> str:
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    return counts if result["varies"] == "no" else f"{result['varies']} {counts}"


def tables(report: dict[str, Any]) -> str:
    """Accuracy, tokens and GFLOPs. No speeds: cells run one after the other; `agglo bench model` times in turns."""
    results = [result for result in _all(report) if not is_beyond_the_paper(result)]
    dense = next(result for result in results if result["name"] == "dense")
    head = f"{_ran(report, results)} Dense: top-1 {dense['top1']:.2f}, {dense['gflops']:.2f} GFLOPs."
    accuracy = table(results, lambda result: f"{result['top1']:.2f}")
    cost = table(results, lambda result: f"{tokens(result)} ({result['gflops']:.2f})")
    return f"{head}\n\nTop-1 (%)\n\n{accuracy}\n\nTokens and GFLOPs\n\n{cost}"


def better_tables(report: dict[str, Any]) -> str:
    """The paper's atc, and each option beyond it: accuracy by linkage, GFLOPs where an option saves some."""
    results = [result for result in _all(report) if (result["method"] or "").startswith("atc")]
    beyond = [result for result in results if is_beyond_the_paper(result)]
    if not beyond:
        return "Not run yet."
    saving = [result for result in results if "acts" in result or "unread" in result or not is_beyond_the_paper(result)]
    accuracy = table(results, lambda result: f"{result['top1']:.2f}")
    cost = table([result for result in saving if "average" in result["name"]], lambda result: f"{result['gflops']:.2f}")
    return f"{_ran(report, beyond)}\n\nTop-1 (%)\n\n{accuracy}\n\nGFLOPs, where an option saves some\n\n{cost}"


def _all(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["results"], *report.get("cannot", [])]


def _ran(report: dict[str, Any], results: list[dict[str, Any]]) -> str:
    measured = [result for result in results if "cannot" not in result]
    dates = sorted({result["date"][:10] for result in measured})
    on = sorted({result.get("processor") or report["machine"]["cpu"] for result in measured})
    name, images = report["model"]["name"], report["data"]["images"]
    return f"{name}, {images} images; {' and '.join(on)}, {' and '.join(dates)}."


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    shelf, speed = (
        json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in ("off-the-shelf.json", "model.json")
    )
    write_between_marks(PAGE, "accuracy", tables(shelf))
    write_between_marks(PAGE, "better", better_tables(shelf))
    indented = "\n".join(f"    {line}" for line in speed_table(speed).splitlines())
    write_between_marks(PAGE, "speed", f"{indented}\n\n({speed['machine']['date'][:10]})")


if __name__ == "__main__":
    main()
