"""An evaluation of a classifier as tables and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agglo.experiments.evaluation import report as reports
from agglo.experiments.evaluation.report import Quality

METRICS = {"top1": "top-1", "top5": "top-5", "mAP": "mAP"}


def main_metric(report: dict[str, Any]) -> str:
    """The first of METRICS that the results have."""
    return next(name for name in METRICS if any(name in result for result in report["results"]))


def sampling_error(percent: float, images: int) -> float:
    """How far an accuracy may be off, in points, because only so many images were seen: half the width of Wilson's
    interval at one standard deviation. With p = percent / 100 and n images that is

        100 * sqrt(p (1 - p) / n + 1 / (4 n^2)) / (1 + 1 / n)

    For many images it is the usual standard error, sqrt(p (1 - p) / n). For few images it stays honest: 0 of 4 right is
    an error of 10 points, where the usual formula says 0.
    """
    p = percent / 100
    return 100 * math.sqrt(p * (1 - p) / images + 1 / (4 * images**2)) / (1 + 1 / images)


def _error(result: dict[str, Any], metric: str) -> float | None:
    """None for mAP, which is no share of images."""
    return sampling_error(result[metric], result["images"]) if metric in ("top1", "top5") else None


def _error_note(results: Sequence[dict[str, Any]], images: int) -> str | None:
    top1 = [result["top1"] for result in results if "top1" in result]
    if not top1:
        return None
    error = max(sampling_error(value, images) for value in top1)
    return f"sampling error of top-1 on {images} images: up to {error:.2f} points"


QUALITY = Quality(METRICS, lambda report: [main_metric(report)], _error, _error_note)


def text(report: dict[str, Any]) -> str:
    """For a terminal."""
    return reports.text(report, QUALITY)


def plot(report: dict[str, Any], path: Path) -> None:
    """Accuracy against the budget and against speed."""
    reports.plot(report, path, QUALITY)
