"""Images per second: of whole networks over batch sizes, and of clustering frameworks over batch sizes and tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agglo.drawing.charts import Curve, CurvePanel, draw_curves
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.reproduce.classifiers import ATC, DENSE, RATES, Entry, named
from agglo.reproduce.compare import grouped, percent, reasons
from agglo.reproduce.estimates import BASE, MULTIPLY_ADDS_PER_SECOND, ON_TWO_CORES, SMALL, TINY, Size
from agglo.reproduce.item import CannotRunError, Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.memory import refused_when_full
from agglo.schedule import Stages

BATCHES = tuple(2**power for power in range(11))
WARM_UP = 0.25  # of all passes
_PARTS = 5  # in which the others are timed
_ENTRIES = (
    Entry("tome", "tome"),
    Entry("kmedoids", "kmedoids"),
    Entry("dpc_knn", "dpc_knn", learns=True),
    *ATC,
)
_UNPRINTED = "The paper draws these and prints no numbers."
_IN_A_ROW = (
    "Cells run one after the other, as in the paper, so that two of them differ by what else the machine did too: "
    "`agglo bench model` and `agglo bench clustering` take turns, and are what claims go by."
)


@dataclass(frozen=True)
class Timing:
    """passes: so many are run, warm-up included, unless that takes longer than `seconds`: then fewer, at least two."""

    passes: int
    seconds: float

    def work(self, settings: Settings, per_pass: float = 0.0) -> float:
        """For the estimate, in multiply-adds: what a device is assumed to get done in that time, or two passes.

        per_pass: multiply-adds of one; 0 where nobody counts them.
        """
        in_time = self.seconds * (ON_TWO_CORES if settings.miniature else MULTIPLY_ADDS_PER_SECOND)
        return max(2 * per_pass, min(self.passes * per_pass or in_time, in_time))


FULL, MINIATURE = Timing(1000, 60.0), Timing(1000, 2.0)


def _require_alone() -> None:
    """Several processes would time each other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("throughput is of one process on one device: start it without accelerate launch or torchrun")


def timed(run: Callable[[], Any], device: torch.device, timing: Timing) -> dict[str, Any]:
    """Seconds of one pass: the first quarter of the passes is not counted, as in the paper. The others are timed in
    parts, of which the median is taken: a moment when the machine had other work to do does not decide."""
    from agglo.experiments.evaluation.turns import seconds_per_pass

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


class WholeNetwork(Item):
    name = "throughput-model"
    shows = "figure backboneInference"
    about = (
        "Images per second of DeiT T, S and B over batch sizes 1 to 1024 at each keep rate, with random weights and "
        "pixels; a batch that does not fit is a result"
    )
    miniature_about = (
        "DeiT-T alone, with random weights as in the full run; up to two seconds per cell instead of a minute."
    )

    def _models(self, miniature: bool) -> dict[str, Size]:
        sizes = {"deit_tiny_patch16_224": TINY, "deit_small_patch16_224": SMALL, "deit_base_patch16_224": BASE}
        return {"deit_tiny_patch16_224": TINY} if miniature else sizes

    def needs(self, miniature: bool) -> Sequence[Need]:
        return ()

    def cells(self, settings: Settings) -> Sequence[Cell]:
        cells = []
        timing = MINIATURE if settings.miniature else FULL
        for model, size in self._models(settings.miniature).items():
            for batch in BATCHES:
                for entry, rate in ((Entry(DENSE, "none"), None), *((e, r) for e in _ENTRIES for r in RATES)):
                    about = {"model": model, "batch": batch, "method": entry.name, "keep_rate": rate}
                    per_pass = batch * size.multiply_adds(None if rate is None else Stages(rate))
                    cells.append(Cell(about, (), timing.work(settings, per_pass)))
        return cells

    def open(self, settings: Settings) -> RunCell:
        from agglo.experiments.devices import require_device
        from agglo.experiments.models import ModelSpec, build
        from agglo.patching import remove

        _require_alone()
        device = require_device(settings.device)
        timing = MINIATURE if settings.miniature else FULL
        opened: dict[str, Any] = {}

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            if about["model"] not in opened:
                opened.clear()
                torch.manual_seed(0)
                opened[about["model"]] = build(ModelSpec(about["model"])).to(device)
            model = opened[about["model"]]
            remove(model)
            if about["method"] != DENSE:
                try:
                    named(_ENTRIES, about["method"]).variant(about["keep_rate"], proportional=True).apply(model)
                except ValueError as error:
                    raise CannotRunError(str(error)) from error
            with refused_when_full(device):
                pixels = torch.rand(about["batch"], 3, 224, 224, device=device)
                found = timed(lambda: model(pixels), device, timing)
            speed = about["batch"] / found["seconds"]
            return {"images_per_second": speed, **found, "threads": torch.get_num_threads(), "device": device.type}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        sections = []
        for (model,), here in grouped(results, "model").items():
            by_place = grouped(here, "method", "keep_rate", "batch")
            batches = sorted({result["batch"] for result in here})
            columns = [Column("method", left=True), Column("keep rate"), *(Column(str(b)) for b in batches)]
            rows = []
            for method, rate in dict.fromkeys((result["method"], result["keep_rate"]) for result in here):
                speeds = [_speed(by_place.get((method, rate, batch))) for batch in batches]
                rows.append([method, "" if rate is None else percent(rate), *speeds])
            text = f"Images per second by batch size. {_UNPRINTED} {_ran(here)} {_IN_A_ROW}\n\n{reasons(here)}"
            sections.append(Section(str(model), Table(columns, rows), text.strip()))
        return sections

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        paths = []
        for (model,), here in grouped([r for r in results if "images_per_second" in r], "model").items():
            dense = [result for result in here if result["method"] == DENSE]
            panels = []
            for rate in sorted({result["keep_rate"] for result in here} - {None}):
                chosen = [*dense, *(result for result in here if result["keep_rate"] == rate)]
                curves = [_curve(str(name), of, "batch") for (name,), of in grouped(chosen, "method").items()]
                panels.append(_panel(curves, "batch size", f"{model}, keep rate {percent(rate)}"))
            if panels:
                paths.append(folder / f"throughput-{model}.png")
                draw_curves(panels, paths[-1], note=_ran(here))
        return paths


class Frameworks(Item):
    """Clustering alone, from features to labels. over: "batch" at 196 tokens, or "tokens" at batch 1."""

    def __init__(self, over: str) -> None:
        self.over = over
        self.name, self.shows = {
            "batch": ("throughput-frameworks", "figure framework_comp"),
            "tokens": ("throughput-tokens", "figure inferenceIM"),
        }[over]
        what = "batch sizes 1 to 1024 at 196 tokens" if over == "batch" else "196 to 4096 tokens at batch 1"
        self.about = (
            f"Images per second of clustering alone over {what}, keep rate 50 %, 64 channels, distances included: "
            "agglo's "
            "backends, scikit-learn, SciPy, fastcluster, and cuML's single linkage where it is installed; SciPy's "
            "trees are "
            "cut into k groups, which the released benchmark does not do"
        )
        self.miniature_about = "The same sizes, up to two seconds per cell instead of a minute."

    def needs(self, miniature: bool) -> Sequence[Need]:
        return tuple(
            Need("extra", module, f"{name}, to compare with")
            for name, module in (("scikit-learn", "sklearn"), ("SciPy", "scipy"), ("fastcluster", "fastcluster"),
                                 ("cuML", "cuml"))
        )  # fmt: skip

    def cells(self, settings: Settings) -> Sequence[Cell]:
        timing = MINIATURE if settings.miniature else FULL
        sizes = [(batch, 196) for batch in BATCHES] if self.over == "batch" else [(1, n) for n in TOKENS]
        cells = []
        for batch, tokens in sizes:
            for framework, module in FRAMEWORKS.items():
                for linkage in ("single",) if framework == "cuml" else ("single", "average", "complete"):
                    about = {"framework": framework, "linkage": linkage, "batch": batch, "tokens": tokens}
                    cells.append(Cell(about, (module,) if module else (), timing.work(settings)))
        return cells

    def open(self, settings: Settings) -> RunCell:
        from agglo.experiments.devices import require_device

        _require_alone()
        device = require_device(settings.device)
        timing = MINIATURE if settings.miniature else FULL

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            generator = torch.Generator().manual_seed(0)
            features = torch.randn(about["batch"], about["tokens"], 64, generator=generator).to(device)
            k = about["tokens"] // 2
            with refused_when_full(device):
                call = contestant(about["framework"], device)
                found = timed(lambda: call(features, k, about["linkage"]), device, timing)
            speed = about["batch"] / found["seconds"]
            return {"images_per_second": speed, **found, "threads": torch.get_num_threads(), "device": device.type}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        by_place = grouped(results, "framework", "linkage", self.over)
        places = sorted({result[self.over] for result in results})
        columns = [Column("framework", left=True), Column("linkage", left=True)]
        columns += [Column(str(place)) for place in places]
        rows = []
        for framework, linkage in dict.fromkeys((result["framework"], result["linkage"]) for result in results):
            rows.append([framework, linkage, *(_speed(by_place.get((framework, linkage, place))) for place in places)])
        text = (
            f"Images per second by {_OVER[self.over]}. {_UNPRINTED} {_ran(results)} {_IN_A_ROW}\n\n{reasons(results)}"
        )
        return [Section("Clustering", Table(columns, rows), text.strip())] if rows else []

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        done = [result for result in results if "images_per_second" in result]
        panels = []
        for (linkage,), here in grouped(done, "linkage").items():
            curves = [_curve(str(name), of, self.over) for (name,), of in grouped(here, "framework").items()]
            panels.append(_panel(curves, _OVER[self.over], f"{linkage} linkage"))
        if not panels:
            return []
        draw_curves(panels, folder / "throughput.png", note=_ran(done))
        return [folder / "throughput.png"]


TOKENS = (196, 256, 576, 1024, 4096)
_TICKS = 6  # places of a panel that are all named; of more, every other one
_OVER = {"batch": "batch size", "tokens": "tokens"}
FRAMEWORKS = {
    "agglo": "",
    "agglo, torch": "",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "fastcluster": "fastcluster",
    "cuml": "cuml",
}


def contestant(framework: str, device: torch.device) -> Callable[[torch.Tensor, int, str], Any]:
    """Labels from features (B, N, D); peers get distances on the CPU, computed where the features are."""
    from agglo.bench.clustering import CONTESTANTS
    from agglo.clustering import cluster
    from agglo.clustering.distances import pairwise as distances

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
    """Image after image, each from its raw features: distances are computed inside."""
    import cupy
    from cuml.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(n_clusters=k, metric="cosine", connectivity="pairwise", linkage=linkage)
    return [model.fit(cupy.from_dlpack(image)).labels_ for image in features]


def _speed(results: Sequence[Result] | None) -> str | None:
    """In words: three digits, or as many as a whole number has."""
    if not results:
        return None
    speed = results[0].get("images_per_second")
    if speed is None:
        return CANNOT
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _curve(name: str, results: Sequence[Result], over: str) -> Curve:
    points = sorted((result[over], result["images_per_second"]) for result in results)
    return Curve(name, [x for x, _ in points], [y for _, y in points])


def _panel(curves: Sequence[Curve], x_label: str, title: str) -> CurvePanel:
    places = sorted({x for curve in curves for x in curve.x})
    ticks = places[::2] if len(places) > _TICKS else places
    return CurvePanel(curves, x_label, "images per second", None, title, ticks, y_log=True, x_log=True)


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


ITEMS = (WholeNetwork(), Frameworks("batch"), Frameworks("tokens"))
