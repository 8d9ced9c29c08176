"""Tables and plots of the evaluation of a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agglo.lab.evaluation import report as reports
from agglo.lab.evaluation.report import Quality

METRICS = {"top1": "top-1", "top5": "top-5", "mAP": "mAP"}


def main_metric(report: dict[str, Any]) -> str:
    """Return the first of METRICS that the results have."""
    return next(name for name in METRICS if any(name in result for result in report["results"]))


QUALITY = Quality(METRICS, lambda report: [main_metric(report)], fractions=("top1", "top5"))


def text(report: dict[str, Any]) -> str:
    """Return the tables as text for a terminal."""
    return reports.text(report, QUALITY)


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot accuracy against the budget and against speed."""
    reports.plot(report, path, QUALITY)
