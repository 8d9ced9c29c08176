"""The demo's table: accuracy and speed of every method at every keep rate, on a few lines."""

from __future__ import annotations

from typing import Any

from agglo.lab.demo.show import keep_rate_of
from agglo.lab.evaluation.report import sampling_error
from agglo.lab.tasks.classification.evaluation.report import METRICS, main_metric
from agglo.utils.machine import load_warning
from agglo.utils.tables import CANNOT, Column, Table


def summary(report: dict[str, Any]) -> str:
    """Return the report of `show` as text for a terminal."""
    metric = main_metric(report)
    results = {(result["name"], keep_rate_of(result)): result for result in report["results"]}
    dense = results["dense", None]
    rates = sorted({rate for _, rate in results if rate is not None}, reverse=True)
    names = dict.fromkeys(name for name, rate in results if rate is not None)

    def cell(result: dict[str, Any]) -> str:
        if "cannot" in result:
            return CANNOT
        return f"{result[metric]:.1f}  {result['images_per_second'] / dense['images_per_second']:.2f}x"

    columns = [Column("", left=True), *(Column(f"keep {rate:g}") for rate in rates)]
    rows = [["dense", cell(dense), *[None] * (len(rates) - 1)]]
    rows += [[name, *(cell(results[name, rate]) for rate in rates)] for name in names]
    model, data, machine = report["model"]["name"], report["data"], report["machine"]
    lines = [
        f"{model} on {data['images']} images of {data['classes']} classes ({data['name']})",
        f"{METRICS[metric]} in percent, and speed against dense:",
        "",
        Table(columns, rows).text(),
        "",
        f"dense: {dense['images_per_second']:.0f} images per second on {machine['gpu'] or machine['cpu']}, "
        f"{report['settings']['threads']} threads; all timed in turns",
    ]
    if metric != "mAP":
        error = sampling_error(dense[metric], data["images"])
        lines.append(f"sampling error of {METRICS[metric]}: about {error:.1f} points")
    if busy := load_warning(machine):
        lines.append(busy)
    return "\n".join(lines)
