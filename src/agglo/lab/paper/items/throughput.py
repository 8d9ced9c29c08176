"""Images per second: of whole networks over batch sizes, and of clustering frameworks over batch sizes and tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agglo.clustering import cluster
from agglo.clustering.distances import pairwise
from agglo.drawing.charts import CurvePanel
from agglo.lab.bench.clustering import CONTESTANTS
from agglo.lab.paper import compare
from agglo.lab.paper.classifiers import ATC, DEITS, LINKAGES, RATES, named, plain
from agglo.lab.paper.compare import DENSE, percent
from agglo.lab.paper.study import CannotRunError, Need, Result, RunCell, Section, Settings, Study, StudyCell
from agglo.models.opening import ModelSpec, build
from agglo.patch import apply
from agglo.utils.devices import require_device
from agglo.utils.tables import CANNOT, Column, Table
from agglo.utils.timing import seconds_per_pass

_PARTS = 5  # in which passes are timed
_OVER = {"batch": "batch size", "tokens": "tokens"}
_SPEED = "images_per_second"
_ENTRIES = (*plain("tome", "kmedoids", "dpc_knn"), *ATC)
_PEERS = {"scikit-learn": "sklearn", "scipy": "scipy", "fastcluster": "fastcluster"}
FRAMEWORKS = ("agglo", "agglo, torch", *_PEERS)


@dataclass(frozen=True)
class Timing:
    """What is timed, and for how long: so many passes of a cell, warm-up included, or fewer within `seconds`."""

    over: str = "batch"  # columns of the table and the axis of the figure: batch or tokens
    models: tuple[str, ...] = ()  # empty for the clustering alone
    sizes: tuple[tuple[int, int], ...] = tuple((2**power, 196) for power in range(11))  # batch size and tokens
    passes: int = 1000
    seconds: float = 60.0

    @property
    def rows(self) -> str:
        """What distinguishes rows and, with `panel`, curves."""
        return "method" if self.models else "framework"

    @property
    def panel(self) -> str:
        """What distinguishes rows and panels; dense models have no keep rate, and are in all panels."""
        return "keep_rate" if self.models else "linkage"


def timed(run: Callable[[], Any], device: torch.device, timing: Timing) -> dict[str, Any]:
    """Return the seconds of one pass: the first quarter of the passes is not counted, as in the paper.

    The others are timed in parts, of which the median is taken: a moment when the machine had other work to do does not
    decide. Where there is no time for so many, the second pass is the one that counts.
    """
    seconds_per_pass(run, device)  # may compile, so that nothing follows from its time
    times, each = [seconds_per_pass(run, device)], 1
    passes = min(timing.passes, math.ceil(timing.seconds / times[0])) - 2
    if passes >= 2 * _PARTS:
        warm_up = passes // 4
        seconds_per_pass(run, device, warm_up)
        each = (passes - warm_up) // _PARTS
        times = [seconds_per_pass(run, device, each) for _ in range(_PARTS)]
    return {"seconds": median(times), "range": [min(times), max(times)], "passes": each * len(times)}


def _axes(timing: Timing, settings: Settings) -> Iterator[StudyCell]:
    for model in timing.models:
        for batch, _ in timing.sizes:
            for method, rate in ((DENSE, None), *((entry.name, rate) for entry in _ENTRIES for rate in RATES)):
                yield StudyCell({"model": model, "batch": batch, "method": method, "keep_rate": rate})
    for batch, tokens in () if timing.models else timing.sizes:
        for framework in FRAMEWORKS:
            package = _PEERS.get(framework)
            needs = (Need("extra", package, f"{framework}, to compare with"),) if package else ()
            for linkage in LINKAGES:
                about = {"framework": framework, "linkage": linkage, "batch": batch, "tokens": tokens}
                yield StudyCell(about, needs)


def _forward(about: Mapping[str, Any], device: torch.device) -> Callable[[], Any]:
    """Return the forward pass of a model with random weights, reduced as a cell says."""
    torch.manual_seed(0)
    model = build(ModelSpec(about["model"])).to(device)
    if entry := named(_ENTRIES, about["method"]):
        try:
            apply(model, entry.config(about["keep_rate"], proportional=True))
        except ValueError as error:
            raise CannotRunError(str(error)) from error
    pixels = torch.rand(about["batch"], 3, 224, 224, device=device)
    return lambda: model(pixels)


def contestant(framework: str) -> Callable[[torch.Tensor, int, str], Any]:
    """Return a function from features (B, N, D) to labels; peers get distances on the CPU."""
    if framework.startswith("agglo"):
        backend = "torch" if framework.endswith("torch") else None
        return lambda features, k, linkage: cluster(features, k=k, linkage=linkage, backend=backend)
    peer = CONTESTANTS[framework]
    return lambda features, k, linkage: peer(pairwise(features, "cosine").cpu(), k, linkage)


def _clustering(about: Mapping[str, Any], device: torch.device) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(about["batch"], about["tokens"], 64, generator=generator).to(device)
    call = contestant(about["framework"])
    return lambda: call(features, about["tokens"] // 2, about["linkage"])


def _speed(results: Sequence[Result] | None) -> str | None:
    """Write three digits, or as many as a whole number has."""
    if not results or _SPEED not in results[0]:
        return CANNOT if results else None
    speed = results[0][_SPEED]
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _where(results: Sequence[Result]) -> str:
    done = [result for result in results if "device" in result]
    threads = " and ".join(map(str, sorted({result["threads"] for result in done})))
    processors = " and ".join(sorted({result["processor"] for result in done}))
    return (
        f"{processors}, {threads} threads; a quarter of the passes is warm-up, the others count by the median of parts."
    )


def _run(timing: Timing, settings: Settings) -> RunCell:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("throughput is of one process on one device: start it without accelerate or torchrun")
    device = require_device(settings.device)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        found = timed((_forward if timing.models else _clustering)(about, device), device, timing)
        threads = torch.get_num_threads()
        return {_SPEED: about["batch"] / found["seconds"], **found, "threads": threads, "device": device.type}

    return run


def _table(results: Sequence[Result], timing: Timing) -> list[Section]:
    sections = []
    for (model,), here in compare.grouped(results, "model").items():
        text = (
            f"Images per second by {_OVER[timing.over]}. The paper draws these and prints no numbers. {_where(here)} "
            "Cells run one after the other, as in the paper, so that two of them differ by what else the machine "
            "did too: `agglo bench model` and `agglo bench clustering` take turns, and are what claims go by."
            f"\n\n{compare.reasons(here)}"
        )
        groups = compare.grouped(here, timing.rows, timing.panel, timing.over)
        sizes = sorted({result[timing.over] for result in here})
        columns = [Column(timing.rows, left=True), Column(timing.panel.replace("_", " "), left=not timing.models)]
        lines = [
            [name, percent(value) if isinstance(value, float) else value or ""]
            + [_speed(groups.get((name, value, size))) for size in sizes]
            for name, value in compare.grouped(here, timing.rows, timing.panel)
        ]
        speeds = Table([*columns, *(Column(str(size)) for size in sizes)], lines)
        sections.append(Section(model or "Clustering", speeds, text.strip()))
    return sections


def _draw(results: Sequence[Result], timing: Timing, settings: Settings, folder: Path) -> list[Path]:
    paths = []
    for (model,), here in compare.grouped([r for r in results if _SPEED in r], "model").items():
        panels = []
        for value in sorted({result[timing.panel] for result in here} - {None}):
            shown = [result for result in here if result[timing.panel] in (None, value)]
            curves = compare.curves(shown, timing.rows, timing.over, _SPEED)
            sizes = sorted({x for curve in curves for x in curve.x})
            title = f"{model}, keep rate {percent(value)}" if model else f"{value} linkage"
            ticks = sizes[::2] if len(sizes) > 6 else sizes
            how: dict[str, Any] = {"title": title, "x_ticks": ticks, "y_log": True, "x_log": True}
            panels.append(CurvePanel(curves, _OVER[timing.over], "images per second", **how))
        name = f"throughput-{model}.png" if model else "throughput.png"
        paths += compare.draw_panels(panels, folder / name, _where(here))
    return paths


_study = partial(Study, axes=_axes, run=_run, table=_table, draw=_draw)
_FRAMEWORKS = (
    "Images per second of clustering alone over {}, keep rate 50 %, 64 channels, distances included: agglo's "
    "backends, scikit-learn, SciPy and fastcluster; SciPy's trees are cut into k groups, which the released "
    "benchmark does not do"
)
_framework_study = partial(_study, stands_in="The same sizes, up to two seconds per cell instead of a minute.")
_TOKENS = Timing("tokens", sizes=tuple((1, tokens) for tokens in (196, 256, 576, 1024, 4096)))
ITEMS = (
    _study(
        name="throughput-model",
        shows="figure backboneInference",
        about="Images per second of DeiT T, S and B over batch sizes 1 to 1024 at each keep rate, with random weights "
        "and pixels; a batch that does not fit is a result",
        stands_in="DeiT-T alone, with random weights as in the full run; up to two seconds per cell instead of a "
        "minute.",
        gpu_hours="5.1",
        full=Timing(models=DEITS),
        miniature=Timing(models=DEITS[:1], seconds=2.0),
    ),
    _framework_study(
        name="throughput-frameworks",
        shows="figure framework_comp",
        about=_FRAMEWORKS.format("batch sizes 1 to 1024 at 196 tokens"),
        gpu_hours="2.8",
        full=Timing(),
        miniature=Timing(seconds=2.0),
    ),
    _framework_study(
        name="throughput-tokens",
        shows="figure inferenceIM",
        about=_FRAMEWORKS.format("196 to 4096 tokens at batch 1"),
        gpu_hours="1.3",
        full=_TOKENS,
        miniature=replace(_TOKENS, seconds=2.0),
    ),
)
