"""Images per second and memory of one model: dense, reduced by each method, and reduced for free.

"free" leaves the same token counts by slicing, which costs nothing and decides nothing: no method can beat it. "dense
again" is the dense model a second time: what its ratio is off 1 is noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from agglo.checks import number
from agglo.config import BUDGETS, ReductionConfig
from agglo.drawing.charts import FREE, SLICED, Bar, BarPanel, draw_bars
from agglo.lab.bench import conclude, in_turns, noise, noise_line, page, where
from agglo.lab.evaluation.configs import Configs, budget_of, configs_of
from agglo.lab.evaluation.grid import GridCell, Reducible
from agglo.lab.options import (
    FLOPS_HELP,
    IMPORT_HELP,
    SCHEDULE_HELP,
    AtLeastOne,
    DeviceOptions,
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
from agglo.utils.machine import machine, peak_memory
from agglo.utils.tables import Column, Table
from agglo.utils.timing import median_ratio, seconds_per_pass

EXAMPLES = """\
examples:
  agglo bench model
  agglo bench model --model vit_small_patch16_224 --batch-size 32 --keep-rate 0.7 0.5
  agglo bench model --model torchvision:vit_b_16 --keep-rate 0.5
  agglo bench model --linkage single average complete --repeats 15 --json speed.json --plot speed.png
  agglo bench model --schedule constant:14 linear:14 stages:0.9,0.7,0.5,blocks=[3,6,9]
  agglo bench model --batch-size 1 2 4 8 16 64 --dtype float32 bfloat16
  agglo bench model --device cuda --dtype float16 --batch-size 256 --image-size 384
"""

_LEAST_SECONDS = 0.25  # a timing shorter than this runs the model several times
_KEEP_RATES = (0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, DeviceOptions):
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
    flops: Sequence[float] = option((), f"as well, or instead: {FLOPS_HELP}", metavar="F")
    schedule: Sequence[str] = option((), f"instead: {SCHEDULE_HELP}", metavar="S", exclusive=True)
    batch_size: Sequence[int] = option((64,), "one table for several", metavar="B", group=DeviceOptions.GROUP)
    dtype: Sequence[str] = option(
        ("float32",), "float32, bfloat16, float16, or several", metavar="DTYPE", group=DeviceOptions.GROUP
    )
    repeats: AtLeastOne = option(7, "turns", group=DeviceOptions.GROUP)
    json: Path | None = option(None, "every timing, the machine and the settings", group="output, besides the table")
    plot: Path | None = option(None, "bars, as .png, .svg or .pdf", group="output, besides the table")

    def __post_init__(self) -> None:
        require_limits(self)
        for batch_size in self.batch_size:
            number("batch_size", batch_size, whole=True, minimum=1)
        for dtype in self.dtype:
            dtype_named(dtype)
        if self.plot is not None:
            require_plot_name(self.plot)
        if self.json is not None:
            require_output(self.json)

    def described(self, device: str, batch_size: int, dtype: str) -> dict[str, Any]:
        """Return what the JSON file holds of the options; the results hold the configs."""
        spec, kept = self.spec(), ("model", "pretrained", "repeats", "threads")
        checkpoint = spec.checkpoint and spec.checkpoint.name
        own = {"checkpoint": checkpoint, "image_size": spec.image_size, "device": device, "dtype": dtype}
        return {**{name: getattr(self, name) for name in kept}, **own, "batch_size": batch_size}


def run(options: Options) -> None:
    """Measure, print a table, write the record and draw the plot, of the largest batch."""
    record = measure(options)
    conclude(record, describe(record), options.json)
    if options.plot is not None:
        plot(run_of(record), options.plot)


def measure(options: Options) -> dict[str, Any]:
    """Return a run for every dtype and batch size."""
    of_batches = [(batch, dtype) for dtype in options.dtype for batch in options.batch_size]
    return {"runs": [_measure(options, batch, dtype) for batch, dtype in of_batches]}


def run_of(record: Mapping[str, Any], batch_size: int | None = None) -> dict[str, Any]:
    """Return the float32 run, or the first if there is none, of a batch size or of the largest one."""
    runs = [run for run in record["runs"] if run["settings"]["dtype"] == "float32"] or record["runs"]
    wanted = max(run["settings"]["batch_size"] for run in runs) if batch_size is None else batch_size
    return next(run for run in runs if run["settings"]["batch_size"] == wanted)


def _measure(options: Options, batch_size: int, dtype_name: str) -> dict[str, Any]:
    reductions = _reductions(options)
    device, dtype = require_device(device_or_best(options.device)), dtype_named(dtype_name)
    with torch_threads(options.threads):
        model = build(options.spec()).to(device, dtype)
        wanted = inputs_for(model)
        shape = (batch_size, len(wanted.mean), *wanted.image_size)
        inputs = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        reducible = Reducible(model, None, "random weights")
        dense, *reduced = reducible.cells(reductions, dense=True)
        again = replace(dense, about={**dense.about, "name": "dense again"})
        able = [cell for cell in reduced if cell.reason is None]
        skipped = [{**cell.about, "reason": cell.reason} for cell in reduced if cell.reason is not None]
        about = {
            "machine": machine(device),
            "settings": options.described(str(device), batch_size, dtype_name),
            "skipped": skipped,
        }
        passes: dict[str, int] = {}
        peaks: dict[str, int | None] = {}

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
        for cell in ordered:
            reducible.apply(cell.config)
            peaks[cell.title] = peak_memory(partial(model, inputs), device)
    free = {
        cell.config: speeds for cell, speeds in zip(ordered, timed, strict=True) if cell.about["name"] == Slice.name
    }
    results = []
    for cell, speeds in zip([dense, again, *able], [timed[0], timed[-1], *timed[1:-1]], strict=True):
        found = {"images_per_second": speeds, "median": median(speeds), "min": min(speeds), "max": max(speeds)}
        found["peak_bytes"] = peaks[cell.title]
        found["to_dense"] = median_ratio(speeds, timed[0])
        found["to_free"] = None if cell.config is None else median_ratio(speeds, free[_free(cell.config)])
        results.append({**cell.about, **found})
    return {**about, "noise": noise(timed[0], timed[-1]), "results": results}


def _reductions(options: Options) -> Configs:
    """Return free reduction and then every method, budget by budget."""
    of_methods = configs_of(
        options.method,
        keep_rates=options.keep_rate or (() if options.schedule or options.flops else _KEEP_RATES),
        flops=options.flops,
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
    """Return one run with all its numbers; of several their ratios to the dense model, and the largest one's memory."""
    if len(record["runs"]) == 1:
        return _describe_one(record["runs"][0])
    first, last = record["runs"][0], run_of(record)
    runs = [{(budget_of(one), one["name"]): one for one in run["results"]} for run in record["runs"]]
    memory = {(budget_of(one), one["name"]): _megabytes(one) for one in last["results"]}
    settings = [run["settings"] for run in record["runs"]]
    several = len({each["dtype"] for each in settings}) > 1
    titles = [f"{each['batch_size']}{', ' + each['dtype'] if several else ''}" for each in settings]
    columns = [Column("budget", left=True), Column("method", left=True), Column("GFLOPs", ".2f")]
    columns += [Column(f"batch {title}", ".2f") for title in titles]
    columns.append(Column(f"peak MB, batch {last['settings']['batch_size']}", ".0f"))
    rows = [[*key, one["gflops"], *(run[key]["to_dense"] for run in runs), memory[key]] for key, one in runs[0].items()]
    skipped = (f"not run: {skip['name']} at {budget_of(skip)}: {skip['reason']}" for skip in first["skipped"])
    speeds = ", ".join(f"{run['results'][0]['median']:.1f}" for run in record["runs"])
    loads = ", ".join(f"{run['machine']['load']:g}" for run in record["runs"])
    notes = (f"dense, images per second: {speeds}", f"load of the machine as each began: {loads}")
    what = f"{first['settings']['model']}, speed against the dense model at each batch size"
    return page(
        first, what, Table(columns, rows), noise_line(max(run["noise"] for run in record["runs"])), *notes, *skipped
    )


def _describe_one(record: Mapping[str, Any]) -> str:
    forms = {
        "gflops": ".2f",
        "median": ".1f",
        "min": ".1f",
        "max": ".1f",
        "peak_bytes": ".0f",
        "to_dense": ".2f",
        "to_free": ".2f",
    }
    columns = [Column(title, left=True) for title in ("budget", "method", "tokens left")]
    columns += map(Column, ("GFLOPs", "img/s", "min", "max", "peak MB", "x dense", "of free"), forms.values())
    rows = []
    for result in record["results"]:
        tokens = " ".join(str(count) for count, _ in groupby(result["counts"]))
        shown = {**result, "peak_bytes": _megabytes(result)}
        rows.append([budget_of(result), result["name"], tokens, *(shown[name] for name in forms)])
    skipped = (f"not run: {skip['name']} at {budget_of(skip)}: {skip['reason']}" for skip in record["skipped"])
    return page(record, _what(record), Table(columns, rows), noise_line(record["noise"]), *skipped)


def _megabytes(result: Mapping[str, Any]) -> float | None:
    return None if result["peak_bytes"] is None else result["peak_bytes"] / 1e6


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
