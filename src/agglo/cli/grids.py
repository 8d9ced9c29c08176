"""What `agglo evaluate` and `agglo detect evaluate` do alike around the grid of a task."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agglo.cli.arguments import budgets, device, require_nothing_typed, variants, whole


def add_workers(group: Any) -> None:
    group.add_argument("--workers", type=whole, default=2, metavar="N", help="that read images (default: %(default)s)")


def add_output(parser: argparse.ArgumentParser, measured: str) -> Any:
    """--json and --plot; returns their group. measured: what the plot shows."""
    group = parser.add_argument_group("output, besides the tables")
    group.add_argument(
        "--json", type=Path, metavar="F", help="all results, complete after every cell; goes on if there"
    )
    group.add_argument(
        "--plot", type=Path, metavar="F", help=f"{measured} by keep rate and speed, as .png, .svg or .pdf"
    )
    return group


def grid_settings(arguments: argparse.Namespace, methods: list[str]) -> dict[str, Any]:
    """What the settings of every grid hold; ValueError for files that cannot be written, before anything runs."""
    from agglo.bench.model_report import require_plot_name
    from agglo.experiments.files import require_output

    if arguments.plot is not None:
        require_plot_name(arguments.plot)
    if arguments.json is not None:
        require_output(arguments.json)
    asked = budgets(arguments)
    if not asked:
        require_nothing_typed(arguments)
    return {
        "data": arguments.data,
        "variants": variants(arguments, asked, methods),
        "dense": not arguments.no_dense,
        "dataset": arguments.dataset,
        "images": arguments.images,
        "skip_bad": arguments.skip_bad,
        "batch_size": arguments.batch_size,
        "workers": arguments.workers,
        "threads": arguments.threads,
        "device": device(arguments),
        "dtype": arguments.dtype,
    }


def tell(
    report: dict[str, Any],
    arguments: argparse.Namespace,
    text: Callable[[dict[str, Any]], str],
    plot: Callable[[dict[str, Any], Path], Any],
) -> None:
    """Print and draw a report; of several processes only the first does."""
    if os.environ.get("RANK", "0") != "0":
        return
    print(text(report))
    if arguments.plot is not None:
        plot(report, arguments.plot)
