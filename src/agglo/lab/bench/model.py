"""Images per second of one model: dense, reduced by each method, and reduced for free.

"free" leaves the same token counts by slicing, which costs nothing and decides nothing: no method can beat it. "dense
again" is the dense model a second time: what its ratio is off 1 is noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from agglo.config import BUDGETS, ReductionConfig
from agglo.drawing.charts import FREE, SLICED, Bar, BarPanel, draw_bars
from agglo.lab.bench import conclude, in_turns, noise, noise_line, page, where
from agglo.lab.evaluation.configs import Configs, budget_of, configs_of
from agglo.lab.evaluation.grid import GridCell, Reducible
from agglo.lab.options import (
    IMPORT_HELP,
    SCHEDULE_HELP,
    AtLeastOne,
    ExecutionOptions,
    ModelOptions,
    device_or_best,
    option,
    require_limits,
    require_plot_name,
)
from agglo.lab.tasks.classification.data.transforms import inputs_for
from agglo.methods.baselines import Slice
from agglo.models.opening import build
from agglo.utils.devices import dtype_named, require_device, torch_threads
from agglo.utils.files import require_output
from agglo.utils.machine import machine
from agglo.utils.tables import Column, Table
from agglo.utils.timing import median_ratio, seconds_per_pass

EXAMPLES = """\
examples:
  agglo bench model
  agglo bench model --model vit_small_patch16_224 --batch-size 32 --keep-rate 0.7 0.5
  agglo bench model --model torchvision:vit_b_16 --keep-rate 0.5
  agglo bench model --linkage single average complete --repeats 15 --json speed.json --plot speed.png
  agglo bench model --schedule constant:14 linear:14 stages:0.9,0.7,0.5,blocks=[3,6,9]
  agglo bench model --device cuda --dtype float16 --batch-size 256 --image-size 384
"""

_LEAST_SECONDS = 0.25  # a timing shorter than this runs the model several times
_KEEP_RATES = (0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, ExecutionOptions):
    """What to measure: every method at every keep rate and schedule.

    There is no threshold: how many tokens it leaves depends on the images, and here they are noise.
    """

    GROUP = "what runs"

    method: Sequence[str] = option(("tome", "atc"), "by name", metavar="M")
    linkage: Sequence[str] | None = option(None, "single, average, complete; of atc (default: average)", metavar="L")
    imports: Sequence[str] = option([], IMPORT_HELP, flags=("--import",), metavar="MODULE", nargs=None, action="append")
    keep_rate: Sequence[float] = option(
        (), "fraction of patch tokens that stays at each stage (default: 0.5 0.25)", metavar="R", exclusive=True
    )
    schedule: Sequence[str] = option((), f"instead: {SCHEDULE_HELP}", metavar="S", exclusive=True)
    repeats: AtLeastOne = option(7, "turns", group=ExecutionOptions.GROUP)
    json: Path | None = option(None, "every timing, the machine and the settings", group="output, besides the table")
    plot: Path | None = option(None, "bars, as .png, .svg or .pdf", group="output, besides the table")

    def __post_init__(self) -> None:
        require_limits(self)
        if self.plot is not None:
            require_plot_name(self.plot)
        if self.json is not None:
            require_output(self.json)

    def described(self, device: str) -> dict[str, Any]:
        """Return what the JSON file holds of the options; the results hold the configs."""
        spec, kept = self.spec(), ("model", "pretrained", "batch_size", "repeats", "threads", "dtype")
        checkpoint = spec.checkpoint and spec.checkpoint.name
        own = {"checkpoint": checkpoint, "image_size": spec.image_size, "device": device}
        return {**{name: getattr(self, name) for name in kept}, **own}


def run(options: Options) -> None:
    """Measure, print a table, write the record and draw the plot."""
    record = measure(options)
    conclude(record, describe(record), options.json)
    if options.plot is not None:
        plot(record, options.plot)


def measure(options: Options) -> dict[str, Any]:
    reductions = _reductions(options)
    device, dtype = require_device(device_or_best(options.device)), dtype_named(options.dtype)
    with torch_threads(options.threads):
        model = build(options.spec()).to(device, dtype)
        wanted = inputs_for(model)
        shape = (options.batch_size, len(wanted.mean), *wanted.image_size)
        inputs = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        reducible = Reducible(model, None, "random weights")
        dense, *reduced = reducible.cells(reductions, dense=True)
        again = replace(dense, about={**dense.about, "name": "dense again"})
        able = [cell for cell in reduced if cell.reason is None]
        skipped = [{**cell.about, "reason": cell.reason} for cell in reduced if cell.reason is not None]
        about = {"machine": machine(device), "settings": options.described(str(device)), "skipped": skipped}
        passes: dict[str, int] = {}

        def speed(cell: GridCell, repeat: int) -> float:
            reducible.apply(cell.config)
            if repeat < 0:
                _seconds(model, inputs, 1)  # fills caches and compiles kernels
                passes[cell.title] = max(1, math.ceil(_LEAST_SECONDS / _seconds(model, inputs, 1)))
                return math.nan
            return len(inputs) / _seconds(model, inputs, passes[cell.title])

        # The dense model first and last: only so far apart does it meet the noise that the others meet.
        ordered = [dense, *able, again]
        timed = in_turns("model", ordered, speed, options.repeats)
    free = {
        cell.config: speeds for cell, speeds in zip(ordered, timed, strict=True) if cell.about["name"] == Slice.name
    }
    results = []
    for cell, speeds in zip([dense, again, *able], [timed[0], timed[-1], *timed[1:-1]], strict=True):
        found = {"images_per_second": speeds, "median": median(speeds), "min": min(speeds), "max": max(speeds)}
        found["to_dense"] = median_ratio(speeds, timed[0])
        found["to_free"] = None if cell.config is None else median_ratio(speeds, free[_free(cell.config)])
        results.append({**cell.about, **found})
    return {**about, "noise": noise(timed[0], timed[-1]), "results": results}


def _reductions(options: Options) -> Configs:
    """Return free reduction and then every method, budget by budget."""
    of_methods = configs_of(
        options.method,
        keep_rates=options.keep_rate or (() if options.schedule else _KEEP_RATES),
        schedules=options.schedule,
        linkages=options.linkage,
    )
    reductions: dict[ReductionConfig, str] = {}
    for config, name in of_methods.items():
        reductions |= {_free(config): Slice.name, config: name}  # the free one stays where its budget's first was
    return reductions


def _free(config: ReductionConfig) -> ReductionConfig:
    """Return the free reduction that leaves as many tokens."""
    budget = {key: value for key, value in config.given().items() if key in BUDGETS}
    return ReductionConfig.of(Slice.name, **budget, proportional=False)


def _seconds(model: nn.Module, inputs: Tensor, passes: int) -> float:
    return seconds_per_pass(lambda: model(inputs), inputs.device, passes)


def describe(record: Mapping[str, Any]) -> str:
    forms = {"gflops": ".2f", "median": ".1f", "min": ".1f", "max": ".1f", "to_dense": ".2f", "to_free": ".2f"}
    columns = [Column(title, left=True) for title in ("budget", "method", "tokens left")]
    columns += map(Column, ("GFLOPs", "img/s", "min", "max", "x dense", "of free"), forms.values())
    rows = []
    for result in record["results"]:
        tokens = " ".join(str(count) for count, _ in groupby(result["counts"]))
        rows.append([budget_of(result), result["name"], tokens, *(result[name] for name in forms)])
    skipped = (f"not run: {skip['name']} at {budget_of(skip)}: {skip['reason']}" for skip in record["skipped"])
    return page(record, _what(record), Table(columns, rows), noise_line(record["noise"]), *skipped)


def _what(record: Mapping[str, Any]) -> str:
    settings, repeats = record["settings"], len(record["results"][0]["images_per_second"])
    return f"{settings['model']}, batch {settings['batch_size']}, {settings['dtype']}, median of {repeats} repeats"


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw bars of images per second, one group per budget, with whiskers from the slowest repeat to the fastest."""
    shown = [result for result in record["results"] if result["name"] != "dense again"]
    groups = [[_bar(result) for result in group] for _, group in groupby(shown, key=budget_of)]
    panel = BarPanel(groups, "images per second (times dense)")
    draw_bars([[panel]], path, title=f"{_what(record)}\n{where(record)}", note="whiskers: slowest and fastest repeat")


def _bar(result: dict[str, Any]) -> Bar:
    # Nothing is sliced away: what is left is the dense model in agglo's loop, a few images at a time.
    name = SLICED if (result["name"], budget_of(result)) == (FREE, "keep 1") else result["name"]
    label = name if name == SLICED else ", ".join(filter(None, (name, budget_of(result))))
    note = f"{result['median']:.0f}  ({result['to_dense']:.2f}x)"
    return Bar(name, result["median"], result["min"], result["max"], note, label)
