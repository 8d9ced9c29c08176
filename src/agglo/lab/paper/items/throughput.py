"""Images per second: of whole networks over batch sizes, and of clustering frameworks over batch sizes and tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agglo.clustering import cluster
from agglo.clustering.distances import pairwise as distances
from agglo.drawing.charts import CurvePanel, draw_curves
from agglo.lab.bench.clustering import CONTESTANTS
from agglo.lab.paper.classifiers import ATC, DEITS, DENSE, LINKAGES, RATES, Entry, named
from agglo.lab.paper.compare import curve_of, grouped, percent, reasons, ticks_of
from agglo.lab.paper.estimates import MULTIPLY_ADDS_PER_SECOND, ON_TWO_CORES
from agglo.lab.paper.study import CannotRunError, Cell, Need, Result, RunCell, Section, Settings, Study
from agglo.models.opening import ModelSpec, build
from agglo.patch import apply, remove
from agglo.schedule import Stages
from agglo.utils.devices import require_device
from agglo.utils.tables import CANNOT, Column, Table
from agglo.utils.timing import seconds_per_pass

BATCHES = tuple(2**power for power in range(11))
TOKENS = (196, 256, 576, 1024, 4096)
WARM_UP = 0.25  # of all passes
_PARTS = 5  # in which the others are timed
_FREE = 0.9  # of the free memory, that may be taken
_TICKS = 6  # of a panel that are all named; of more, every other one
_OVER = {"batch": "batch size", "tokens": "tokens"}
_SPEED = "images_per_second"
_ENTRIES = (Entry("tome", "tome"), Entry("kmedoids", "kmedoids"), Entry("dpc_knn", "dpc_knn", learns=True), *ATC)
_PEERS = {"scikit-learn": "sklearn", "scipy": "scipy", "fastcluster": "fastcluster", "cuml": "cuml"}
FRAMEWORKS = ("agglo", "agglo, torch", *_PEERS)
_UNPRINTED = "The paper draws these and prints no numbers."
_IN_A_ROW = (
    "Cells run one after the other, as in the paper, so that two of them differ by what else the machine did too: "
    "`agglo bench model` and `agglo bench clustering` take turns, and are what claims go by."
)


@dataclass(frozen=True)
class Timing:
    """How long a cell is timed.

    Attributes:
        passes: So many are run, warm-up included, unless that takes longer than `seconds`: then fewer, at least two.
        models: Whole networks that are timed.
        per_second: Multiply-adds that the device is assumed to get done, for the estimate.
    """

    passes: int
    seconds: float
    models: tuple[str, ...] = tuple(DEITS)
    per_second: float = MULTIPLY_ADDS_PER_SECOND

    def cost(self, per_pass: float = 0.0) -> float:
        """Return the multiply-adds of a cell; of a pass, 0 stands where nobody counts them."""
        in_time = self.seconds * self.per_second
        return max(2 * per_pass, min(self.passes * per_pass or in_time, in_time))


FULL, MINIATURE = Timing(1000, 60.0), Timing(1000, 2.0, ("deit_tiny_patch16_224",), ON_TWO_CORES)


def timed(run: Callable[[], Any], device: torch.device, timing: Timing) -> dict[str, Any]:
    """Return the seconds of one pass: the first quarter of the passes is not counted, as in the paper.

    The others are timed in parts, of which the median is taken: a moment when the machine had other work to do does not
    decide.
    """
    seconds_per_pass(run, device)  # may compile, so that nothing follows from its time
    second = seconds_per_pass(run, device)
    passes = max(2, min(timing.passes, math.ceil(timing.seconds / second)))
    warm_up = max(1, int(passes * WARM_UP))
    if warm_up > 2:
        seconds_per_pass(run, device, warm_up - 2)
    times = [second] if warm_up == 1 else []
    counted = passes - warm_up
    ends = [(counted - len(times)) * part // _PARTS for part in range(_PARTS + 1)]
    times += [seconds_per_pass(run, device, end - start) for start, end in pairwise(ends) if end > start]
    return {"seconds": median(times), "range": [min(times), max(times)], "passes": counted}


@contextmanager
def refused_when_full(device: torch.device) -> Iterator[None]:
    """Let a CPU's memory be refused once nearly all that was free is taken: an error in Python.

    Linux would otherwise promise it and kill the process later. A GPU refuses by itself.
    """
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    if device.type != "cpu" or free is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # The limit counts all private memory that may be written, used or not.
    limit = 1024 * ((_kilobytes("/proc/self/status", "VmData") or 0) + int(_FREE * free))
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _kilobytes(path: str, name: str) -> int | None:
    """Read an entry of a file that Linux has; None elsewhere."""
    if not Path(path).exists():
        return None
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _alone_on(settings: Settings) -> torch.device:
    """Return the device; several processes would time each other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("throughput is of one process on one device: start it without accelerate launch or torchrun")
    return require_device(settings.device)


def _model_axes(timing: Timing, settings: Settings) -> Iterator[Cell]:
    for model in timing.models:
        for batch in BATCHES:
            for method, rate in ((DENSE, None), *((entry.name, rate) for entry in _ENTRIES for rate in RATES)):
                about = {"model": model, "batch": batch, "method": method, "keep_rate": rate}
                per_image = DEITS[model].multiply_adds(None if rate is None else Stages(rate))
                yield Cell(about, (), timing.cost(batch * per_image))


def _run_model(timing: Timing, settings: Settings) -> RunCell:
    device = _alone_on(settings)
    opened: dict[str, Any] = {}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        if about["model"] not in opened:
            opened.clear()
            torch.manual_seed(0)
            opened[about["model"]] = build(ModelSpec(about["model"])).to(device)
        model = opened[about["model"]]
        remove(model)
        if about["method"] != DENSE:
            try:
                apply(model, named(_ENTRIES, about["method"]).config(about["keep_rate"], proportional=True))
            except ValueError as error:
                raise CannotRunError(str(error)) from error
        with refused_when_full(device):
            pixels = torch.rand(about["batch"], 3, 224, 224, device=device)
            found = timed(lambda: model(pixels), device, timing)
        return _result(about["batch"], found, device)

    return run


def _result(batch: int, found: dict[str, Any], device: torch.device) -> dict[str, Any]:
    how = {"threads": torch.get_num_threads(), "device": device.type}
    return {_SPEED: batch / found["seconds"], **found, **how}


def _model_table(results: Sequence[Result], timing: Timing) -> list[Section]:
    sections = []
    for (model,), here in grouped(results, "model").items():
        table = _speeds(here, {"method": "method", "keep_rate": "keep rate"}, "batch")
        sections.append(Section(model, table, _text(here, "batch")))
    return sections


def _speeds(results: Sequence[Result], heads: Mapping[str, str], over: str) -> Table:
    """Make a table with a row for every value of the heads, a column for every batch size or number of tokens."""
    groups = grouped(results, *heads, over)
    places = sorted({result[over] for result in results})
    columns = [Column(head, left=head != "keep rate") for head in heads.values()]
    rows = []
    for names in grouped(results, *heads):
        shown = ["" if name is None else percent(name) if isinstance(name, float) else name for name in names]
        rows.append([*shown, *(_speed(groups.get((*names, place))) for place in places)])
    return Table([*columns, *(Column(str(place)) for place in places)], rows)


def _speed(results: Sequence[Result] | None) -> str | None:
    """Write three digits, or as many as a whole number has."""
    if not results:
        return None
    speed = results[0].get(_SPEED)
    if speed is None:
        return CANNOT
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _text(results: Sequence[Result], over: str) -> str:
    text = f"Images per second by {_OVER[over]}. {_UNPRINTED} {_ran(results)} {_IN_A_ROW}\n\n{reasons(results)}"
    return text.strip()


def _ran(results: Sequence[Result]) -> str:
    done = [result for result in results if "device" in result]
    if not done:
        return ""
    threads = sorted({result["threads"] for result in done})
    devices = sorted({result["processor"] for result in done})
    many = f", {' and '.join(map(str, threads))} threads" if done[0]["device"] == "cpu" else ""
    return (
        f"{' and '.join(devices)}{many}; a quarter of the passes is warm-up, the others count by the median of parts."
    )


def _panel(results: Sequence[Result], by: str, over: str, title: str) -> CurvePanel:
    curves = [curve_of(name, of, over, _SPEED) for (name,), of in grouped(results, by).items()]
    ticks = ticks_of(curves)
    ticks = ticks[::2] if len(ticks) > _TICKS else ticks
    return CurvePanel(curves, _OVER[over], "images per second", None, title, ticks, y_log=True, x_log=True)


def _draw_model(results: Sequence[Result], timing: Timing, settings: Settings, folder: Path) -> list[Path]:
    paths = []
    for (model,), here in grouped([r for r in results if _SPEED in r], "model").items():
        panels = []
        for rate in sorted({result["keep_rate"] for result in here} - {None}):
            chosen = [result for result in here if result["keep_rate"] in (None, rate)]
            panels.append(_panel(chosen, "method", "batch", f"{model}, keep rate {percent(rate)}"))
        if panels:
            paths.append(folder / f"throughput-{model}.png")
            draw_curves(panels, paths[-1], note=_ran(here))
    return paths


def _frameworks(over: str) -> Study:
    """Return the study of clustering alone, from features to labels: over batches, or over tokens at batch 1."""
    sizes = [(batch, 196) for batch in BATCHES] if over == "batch" else [(1, tokens) for tokens in TOKENS]
    what = "batch sizes 1 to 1024 at 196 tokens" if over == "batch" else "196 to 4096 tokens at batch 1"

    def axes(timing: Timing, settings: Settings) -> Iterator[Cell]:
        for batch, tokens in sizes:
            for name in FRAMEWORKS:
                needs = (Need("extra", _PEERS[name], f"{name}, to compare with"),) if name in _PEERS else ()
                for linkage in ("single",) if name == "cuml" else LINKAGES:
                    about = {"framework": name, "linkage": linkage, "batch": batch, "tokens": tokens}
                    yield Cell(about, needs, timing.cost())

    def table(results: Sequence[Result], timing: Timing) -> list[Section]:
        speeds = _speeds(results, {"framework": "framework", "linkage": "linkage"}, over)
        return [Section("Clustering", speeds, _text(results, over))] if results else []

    def draw(results: Sequence[Result], timing: Timing, settings: Settings, folder: Path) -> list[Path]:
        done = [result for result in results if _SPEED in result]
        by_linkage = grouped(done, "linkage").items()
        panels = [_panel(here, "framework", over, f"{linkage} linkage") for (linkage,), here in by_linkage]
        if not panels:
            return []
        draw_curves(panels, folder / "throughput.png", note=_ran(done))
        return [folder / "throughput.png"]

    return Study(
        name="throughput-frameworks" if over == "batch" else "throughput-tokens",
        shows="figure framework_comp" if over == "batch" else "figure inferenceIM",
        about=f"Images per second of clustering alone over {what}, keep rate 50 %, 64 channels, distances included: "
        "agglo's backends, scikit-learn, SciPy, fastcluster, and cuML's single linkage where it is installed; SciPy's "
        "trees are cut into k groups, which the released benchmark does not do",
        stands_in="The same sizes, up to two seconds per cell instead of a minute.",
        full=FULL,
        miniature=MINIATURE,
        axes=axes,
        run=_run_framework,
        table=table,
        draw=draw,
    )


def _run_framework(timing: Timing, settings: Settings) -> RunCell:
    device = _alone_on(settings)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(about["batch"], about["tokens"], 64, generator=generator).to(device)
        with refused_when_full(device):
            call = contestant(about["framework"], device)
            found = timed(lambda: call(features, about["tokens"] // 2, about["linkage"]), device, timing)
        return _result(about["batch"], found, device)

    return run


def contestant(framework: str, device: torch.device) -> Callable[[torch.Tensor, int, str], Any]:
    """Return a function from features (B, N, D) to labels; peers get distances on the CPU."""
    if framework.startswith("agglo"):
        backend = "torch" if framework.endswith("torch") else None
        return lambda features, k, linkage: cluster(features, k=k, linkage=linkage, backend=backend)
    if framework == "cuml":
        if device.type != "cuda" or find_spec("cuml") is None:
            raise CannotRunError("cuML clusters on a CUDA device")
        return _by_cuml
    peer = CONTESTANTS[framework]
    return lambda features, k, linkage: peer(distances(features, "cosine").cpu(), k, linkage)


def _by_cuml(features: torch.Tensor, k: int, linkage: str) -> Any:
    """Cluster image after image, each from its raw features: distances are computed inside."""
    import cupy
    from cuml.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(n_clusters=k, metric="cosine", connectivity="pairwise", linkage=linkage)
    return [model.fit(cupy.from_dlpack(image)).labels_ for image in features]


ITEMS = (
    Study(
        name="throughput-model",
        shows="figure backboneInference",
        about="Images per second of DeiT T, S and B over batch sizes 1 to 1024 at each keep rate, with random weights "
        "and pixels; a batch that does not fit is a result",
        stands_in="DeiT-T alone, with random weights as in the full run; up to two seconds per cell instead of a "
        "minute.",
        full=FULL,
        miniature=MINIATURE,
        axes=_model_axes,
        run=_run_model,
        table=_model_table,
        draw=_draw_model,
    ),
    _frameworks("batch"),
    _frameworks("tokens"),
)
