"""The off-the-shelf results as tables for the docs.

make off-the-shelf CHECKPOINT=deit_tiny_patch16_224.safetensors IMAGES=imagenet
python benchmarks/off_the_shelf_table.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.experiments.tables import CANNOT, Column, Table

DEFAULT = Path(__file__).parent / "results" / "off-the-shelf.json"


def label(result: dict[str, Any]) -> str:
    """The name, with the weights that K-Medoids and DPC-KNN were asked to use, and the attention if not their own."""
    method = result["method"] or ""
    weights = ", equal weights" if "weights=equal" in method else ", attention weights" if method == "kmedoids" else ""
    proportional = ", proportional attention" if result["proportional"] else ""
    return f"{result['name']}{weights}{proportional}"


def table(results: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    rates = sorted({result["keep_rate"] for result in results} - {None}, reverse=True)
    rows = []
    for name in dict.fromkeys(label(result) for result in results if result["keep_rate"] is not None):
        found = {result["keep_rate"]: result for result in results if label(result) == name}
        rows.append([name, *(text(found.get(rate), cell) for rate in rates)])
    return Table([Column("method", left=True), *(Column(f"{rate:.0%}") for rate in rates)], rows).markdown()


def text(result: dict[str, Any] | None, cell: Callable[[dict[str, Any]], str]) -> str:
    return "not run" if result is None else CANNOT if "cannot" in result else cell(result)


def tokens(result: dict[str, Any]) -> str:
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    return counts if result["varies"] == "no" else f"{result['varies']} {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="?", default=DEFAULT)
    report = json.loads(parser.parse_args().json.read_text(encoding="utf-8"))
    results, machine = report["results"], report["machine"]
    dense = next(result for result in results if result["name"] == "dense")
    print(
        f"{report['model']['name']}, {report['data']['images']} images; {machine['cpu']}, "
        f"{report['settings']['threads']} threads, batch {report['settings']['batch_size']}, {machine['date'][:10]}. "
        f"Dense: top-1 {dense['top1']:.2f}, {dense['gflops']:.2f} GFLOPs, {dense['images_per_second']:.0f} images/s.\n"
    )
    print("Top-1 (%)\n\n" + table(results, lambda result: f"{result['top1']:.2f}"))
    print("\nImages per second\n\n" + table(results, lambda result: f"{result['images_per_second']:.0f}"))
    print("\nTokens and GFLOPs\n\n" + table(results, lambda result: f"{tokens(result)} ({result['gflops']:.2f})"))


if __name__ == "__main__":
    main()
