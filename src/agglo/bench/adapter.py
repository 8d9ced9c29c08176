"""A detector's backbone part by part: dense, and reduced by several methods at several keep rates.

The parts are timed where they run, within one forward pass:

    convolutions   patch embedding, spatial prior, and what makes the four maps at the end
    interactions   injectors and extractors, which see all patches whatever was merged
    method         the decision what to merge, with all comparisons of tokens
    blocks         all that is left: the ViT's blocks, merging and unmerging

All variants take turns within every repeat, there and back, so that a machine that slows down slows all of them; ratios
are taken within a repeat. Weights are random; the picture is smooth, as pictures are. Beside that, the memory that
clustering the picture's tokens takes, in a process of its own, in units of the N x N float32 matrix of distances.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.experiments.devices import torch_threads
from agglo.experiments.files import require_output, write_json
from agglo.experiments.machine import load_warning, machine
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table
from agglo.methods import Method, Outcome, View, parse_method
from agglo.methods.helpers.text import method_text
from agglo.methods.helpers.watching import Reduce, watched
from agglo.patching import apply, reduction, remove

PARTS = ("convolutions", "interactions", "method", "blocks")
_MATRIX_ENTRY = 4  # bytes of a float32


class Stopwatch:
    """Seconds spent in each part of a pass."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def watch(self, module: nn.Module, name: str) -> None:
        """Count the forward passes of a module to a part, for good."""
        begins: list[float] = []
        module.register_forward_pre_hook(lambda *_: begins.append(time.perf_counter()))
        module.register_forward_hook(lambda *_: self._add(name, begins.pop()))

    def _add(self, name: str, begin: float) -> None:
        self.seconds[name] += time.perf_counter() - begin


def timed(method: Method, watch: Stopwatch) -> Method:
    """The same method, its decisions timed."""

    def around(reduce: Reduce, view: View) -> Outcome:
        with watch.part("method"):
            return reduce(view)

    return watched(method, around)


@dataclass
class Variant:
    """The dense backbone, or a method at a keep rate. passes: seconds of each part, and of all, of every pass."""

    method: Method | None = None
    keep_rate: float | None = None
    counts: list[int] | None = None
    gflops: float = 0.0
    passes: list[dict[str, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "dense" if self.method is None else method_text(self.method)

    def seconds(self, part: str = "all") -> float:
        return median(each[part] for each in self.passes)

    def to_dense(self, dense: Variant, part: str = "all") -> float:
        """A part's time as a fraction of the whole dense backbone's, the median of the repeats."""
        pairs = zip(self.passes, dense.passes, strict=True)
        return median(mine[part] / its["all"] for mine, its in pairs)


def picture(batch: int, height: int, width: int) -> Tensor:
    """Smooth random images (B, 3, H, W) with a little noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(batch, 3, max(2, height // 64), max(2, width // 64), generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)
    return smooth + 0.1 * torch.randn(smooth.shape, generator=generator)


def backbone(size: str, image: Sequence[int], watch: Stopwatch) -> Any:
    """ViT-Adapter in evaluation mode with random weights, its parts watched."""
    from agglo.detection.model.adapter import ViTAdapter
    from agglo.detection.model.vit import plain_vit

    torch.manual_seed(0)
    adapter = ViTAdapter(plain_vit(size), nominal_size=(image[0], image[1])).eval()
    for module in (adapter.vit.patch_embed, adapter.prior, adapter.up, *adapter.norms):
        watch.watch(module, "convolutions")
    for interaction in adapter.interactions:
        for module in (interaction.injector, *interaction.extractors):  # type: ignore[misc]
            watch.watch(module, "interactions")
    return adapter


def measure(
    adapter: Any, variants: Sequence[Variant], images: Tensor, repeats: int, watch: Stopwatch
) -> Iterator[Variant]:
    """Run all variants in turns, a turn more than is kept to warm up; yields after every pass."""
    for repeat in range(repeats + 1):
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            if variant.method is None:
                remove(adapter)
            else:
                apply(adapter, timed(variant.method, watch), keep_rate=variant.keep_rate)
            watch.seconds = dict.fromkeys(PARTS, 0.0)
            begin = time.perf_counter()
            with torch.inference_mode():
                adapter(images)
            whole = time.perf_counter() - begin
            parts = {**watch.seconds, "blocks": whole - sum(watch.seconds.values()), "all": whole}
            if repeat > 0:
                variant.passes.append(parts)
            yield variant
    remove(adapter)


def describe(adapter: Any, variant: Variant) -> None:
    """Note what a variant leaves and costs."""
    asked = Variant(parse_method("atc"), 1.0) if variant.method is None else variant
    assert asked.method is not None
    apply(adapter, asked.method, keep_rate=asked.keep_rate)
    report = reduction(adapter)
    assert report is not None
    variant.counts = report.counts
    variant.gflops = report.gflops_before if report.gflops_after is None else report.gflops_after
    remove(adapter)


# ru_maxrss will not do: a process begins with that of the one which started it.
_ONE_CLUSTERING = """
import json, sys, torch
from pathlib import Path
from agglo.clustering import cluster

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

n, width, k, linkage = json.loads(sys.argv[1])
torch.set_num_threads(1)
tokens = torch.randn(1, n, width, generator=torch.Generator().manual_seed(0))
for warm_up in (min(n, 128), min(n, 640), min(n, 1100)):  # all ways, whose code takes memory as well
    cluster(tokens[:, :warm_up], max(1, warm_up * k // n), linkage, check=False)
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = kilobytes("VmRSS")
cluster(tokens, k, linkage, check=False)
print(kilobytes("VmHWM") - before)
"""


def clustering_memory(n_tokens: int, width: int, k: int, linkage: str) -> float | None:
    """By how many N x N float32 matrices a process grows while it clusters n_tokens; None where there is no Linux to
    tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    words = json.dumps([n_tokens, width, k, linkage])
    # Otherwise glibc keeps what the warm-up returned, and the peak would not show what is taken out of it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _ONE_CLUSTERING, words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(ran.stdout) * 1024 / (n_tokens * n_tokens * _MATRIX_ENTRY)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny", help="of the ViT (default: %(default)s)")
    parser.add_argument(
        "--image", type=int, nargs=2, default=(800, 1344), metavar=("H", "W"), help="pixels, multiples of 32"
    )
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--method", nargs="+", default=["atc", "tome"], help="as text, such as atc:linkage=single")
    parser.add_argument("--keep-rate", type=float, nargs="+", default=[0.9, 0.7, 0.5])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; as it is by default")
    parser.add_argument("--json", type=Path, metavar="F", help="every timing, the machine and the settings")


def run(arguments: argparse.Namespace) -> None:
    if arguments.repeats < 1 or arguments.batch_size < 1:
        raise ValueError(f"repeats={arguments.repeats} and batch_size={arguments.batch_size} must be at least 1")
    if arguments.json is not None:
        require_output(arguments.json)
    where = machine()
    warning = load_warning(where)
    variants = [Variant()]
    variants += [Variant(parse_method(text), rate) for text in arguments.method for rate in arguments.keep_rate]
    watch = Stopwatch()
    with torch_threads(arguments.threads):
        where["threads"] = torch.get_num_threads()
        adapter = backbone(arguments.size, arguments.image, watch)
        for variant in variants:
            describe(adapter, variant)
        images = picture(arguments.batch_size, *arguments.image)
        with progress(len(variants) * (arguments.repeats + 1), "bench adapter") as advance:
            for variant in measure(adapter, variants, images, arguments.repeats, watch):
                advance(variant.name)
    report = as_dict(variants, {**vars(arguments)}, where)
    n_tokens = report["tokens"]
    report["clustering_memory_in_matrices"] = {
        linkage: clustering_memory(n_tokens, 64, max(1, int(n_tokens * 0.7)), linkage)
        for linkage in ("average", "single", "complete")
    }
    if arguments.json is not None:
        write_json(arguments.json, report)
    print(where if warning is None else f"{warning}\n{where}")
    print(table(variants).markdown())
    memory = report["clustering_memory_in_matrices"].items()
    grown = ", ".join(f"{linkage} {'unknown' if v is None else format(v, '.2f')}" for linkage, v in memory)
    print(f"clustering {n_tokens} tokens takes so many N x N float32 matrices: {grown}")


def as_dict(variants: Sequence[Variant], settings: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """For the JSON file."""
    dense = variants[0]
    assert dense.counts is not None
    kept = ("size", "image", "batch_size", "method", "keep_rate", "repeats")
    results = [
        {
            "name": variant.name,
            "keep_rate": variant.keep_rate,
            "counts": variant.counts,
            "gflops": variant.gflops,
            "to_dense": {part: variant.to_dense(dense, part) for part in (*PARTS, "all")},
            "passes": variant.passes,
        }
        for variant in variants
    ]
    settings = {name: settings[name] for name in kept}
    return {"machine": where, "settings": settings, "tokens": dense.counts[0], "results": results}


def table(variants: Sequence[Variant]) -> Table:
    """Milliseconds of each part, and what all of it and the method are of the dense backbone."""
    dense = variants[0]
    columns = [Column("backbone", left=True), Column("keep rate", left=True), Column("GFLOPs", ".1f")]
    columns += [Column(f"{part}, ms", ".1f") for part in (*PARTS, "all")]
    columns += [Column("method of dense", ".1%"), Column("all of dense", ".1%")]
    rows = [
        [
            variant.name,
            "" if variant.keep_rate is None else f"{variant.keep_rate:g}",
            variant.gflops,
            *(variant.seconds(part) * 1e3 for part in (*PARTS, "all")),
            variant.to_dense(dense, "method"),
            variant.to_dense(dense),
        ]
        for variant in variants
    ]
    return Table(columns, rows)
