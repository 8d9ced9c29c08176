"""An evaluation of a detector as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agglo.detection.evaluation.average_precision import NUMBERS
from agglo.experiments.evaluation import report as reports
from agglo.experiments.evaluation.report import Quality
from agglo.experiments.tables import Column, Table
from agglo.experiments.variants import describe_budget

MAIN = ("box_AP", "mask_AP")
QUALITY = Quality({"box_AP": "box AP", "mask_AP": "mask AP"}, lambda report: MAIN)


def text(report: dict[str, Any]) -> str:
    """For a terminal: a row for each cell, methods by keep rates, and all of COCO's numbers."""
    return f"{reports.text(report, QUALITY)}\n\n{all_numbers(report)}"


def all_numbers(report: dict[str, Any]) -> str:
    """Two rows for each cell, of boxes and of masks. Sizes: below 32 x 32 pixels, below 96 x 96, and larger."""
    rows = [
        [result["name"], describe_budget(result), kind, *(result[f"{kind}_{name}"] for name in NUMBERS)]
        for result in report["results"]
        if "cannot" not in result
        for kind in ("box", "mask")
    ]
    words = [Column(title, left=True) for title in ("variant", "budget", "of")]
    return Table([*words, *(Column(name, ".1f") for name in NUMBERS)], rows).text()


def plot(report: dict[str, Any], path: Path) -> None:
    """Box and mask AP against the budget, and box AP against speed."""
    reports.plot(report, path, QUALITY)
