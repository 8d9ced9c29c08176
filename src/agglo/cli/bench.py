"""agglo bench model, agglo bench clustering, ...: every benchmark of `reproduce/registry.py`"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agglo.cli.arguments import (
    add_budget,
    add_command,
    add_execution,
    add_methods,
    add_model,
    budgets,
    device,
    model_spec,
    positive,
)
from agglo.reproduce.registry import BENCHMARKS, Benchmark

_DETAILS = """\
Images per second of one model: dense, reduced by each method, and reduced for free, that is to the same token counts
by slicing, which no method can beat. All variants take turns in one run; ratios are taken within each turn, and the
dense model is timed twice to show how much is noise. The JSON file is complete after every repeat.
"""

_EXAMPLES = """\
examples:
  agglo bench model
  agglo bench model --model vit_small_patch16_224 --batch-size 32 --keep-rate 0.7 0.5
  agglo bench model --model torchvision:vit_b_16 --keep-rate 0.5
  agglo bench model --linkage single average complete --repeats 15 --json speed.json --plot speed.png
  agglo bench model --schedule constant:14 linear:14 stages:0.9,0.7,0.5@3,6,9
  agglo bench model --device cuda --dtype float16 --batch-size 256 --image-size 384
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    subjects = parser.add_subparsers(title="what to measure", metavar="<subject>", dest="subject", required=True)
    for benchmark in BENCHMARKS:
        if benchmark.name == "model":
            _add_model_benchmark(subjects, benchmark)
        else:
            _add_benchmark(subjects, benchmark)


def _add_benchmark(subjects: Any, benchmark: Benchmark) -> None:
    """One that reads its own arguments."""
    module = benchmark.load()
    parser = add_command(subjects, benchmark.name, about=benchmark.about, details=module.__doc__ or "", examples="")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def _add_model_benchmark(subjects: Any, benchmark: Benchmark) -> None:
    parser = add_command(subjects, "model", about=benchmark.about, details=_DETAILS, examples=_EXAMPLES)
    add_model(parser)
    what = parser.add_argument_group("what runs")
    add_methods(what, ["tome", "atc"])
    add_budget(what, "0.5 0.25", threshold=False)
    how = parser.add_argument_group("how it is measured")
    add_execution(how)
    how.add_argument("--repeats", type=positive, default=7, metavar="N", help="turns (default: %(default)s)")
    out = parser.add_argument_group("output, besides the table")
    out.add_argument("--json", type=Path, metavar="F", help="every timing, the machine and the settings")
    out.add_argument("--plot", type=Path, metavar="F", help="bars, as .png, .svg or .pdf")
    parser.set_defaults(run=run_model)


def run_model(arguments: argparse.Namespace) -> None:
    from agglo.bench import model as benchmark_model
    from agglo.bench.model_report import plot, require_plot_name, table
    from agglo.experiments.files import require_output

    if arguments.plot is not None:
        require_plot_name(arguments.plot)
    if arguments.json is not None:
        require_output(arguments.json)
    asked = budgets(arguments) or {"keep_rates": [0.5, 0.25]}
    settings = benchmark_model.BenchSettings(
        model=model_spec(arguments),
        batch_size=arguments.batch_size,
        keep_rates=asked.get("keep_rates", ()),
        schedules=asked.get("schedules", ()),
        methods=arguments.method,
        linkages=arguments.linkage,
        repeats=arguments.repeats,
        threads=arguments.threads,
        device=device(arguments),
        dtype=arguments.dtype,
    )
    report = benchmark_model.run(settings, arguments.json).as_dict()
    print(table(report))
    if arguments.plot is not None:
        plot(report, arguments.plot)
