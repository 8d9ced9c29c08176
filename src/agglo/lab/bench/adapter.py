"""A detector's backbone part by part: dense, and reduced by several methods at several keep rates.

The parts are timed where they run, within one forward pass:

    convolutions   patch embedding, spatial prior, and what makes the four maps at the end
    interactions   injectors and extractors, which see all patches whatever was merged
    method         the decision what to merge, with all comparisons of tokens
    blocks         all that is left: the ViT's blocks, merging and unmerging

All contenders take turns within every repeat, there and back, so that a slow machine slows all of them; ratios
are taken within a repeat. Weights are random; the image is smooth, as photos are. Beside that, the memory that
clustering the image's tokens takes, in a process of its own, in units of the N x N float32 matrix of distances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.clustering.arguments import LINKAGES
from agglo.config import ReductionConfig
from agglo.lab.bench import TimingOptions, conclude
from agglo.lab.bench.clustering import peak_memory
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.options import AtLeastOne, option
from agglo.methods import Method, Outcome, View
from agglo.methods.helpers.watching import Reduce, watched
from agglo.patch import apply, remove, report
from agglo.utils.devices import torch_threads
from agglo.utils.machine import machine
from agglo.utils.progress import progress
from agglo.utils.tables import Column, Table
from agglo.utils.timing import median_ratio, stopwatch, timed_pass, turns

PARTS = ("convolutions", "interactions", "method", "blocks")


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    size: Literal["tiny", "small"] = option("tiny", "of the ViT")
    image: tuple[int, int] = option((800, 1344), "pixels, multiples of 32", metavar=("H", "W"))
    batch_size: AtLeastOne = option(1, "images")
    method: Sequence[str] = option(("atc", "tome"), "by name, or as text such as atc:linkage=single", metavar="M")
    keep_rate: Sequence[float] = option((0.9, 0.7, 0.5), "fraction of patch tokens that stays", metavar="R")
    repeats: AtLeastOne = 3


class Parts:
    """Seconds spent in each part of a pass."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with stopwatch() as taken:
            yield
        self.seconds[name] += taken.seconds

    def watch(self, module: nn.Module, name: str) -> None:
        """Count the forward passes of a module to a part, for good."""
        forward = module.forward

        def timed_forward(*inputs: Any, **options: Any) -> Any:
            with self.part(name):
                return forward(*inputs, **options)

        module.forward = timed_forward


def timed(method: Method, watch: Parts) -> Method:
    """Return the same method, its decisions timed."""

    def around(reduce: Reduce, view: View) -> Outcome:
        with watch.part("method"):
            return reduce(view)

    return watched(method, around)


@dataclass
class Contender:
    """The dense backbone, or a method at a keep rate. passes: seconds of each part, and of all, of every pass."""

    name: str = "dense"
    config: ReductionConfig | None = None
    counts: list[int] | None = None
    gflops: float = 0.0
    passes: list[dict[str, float]] = field(default_factory=list)

    def to_dense(self, dense: Contender, part: str = "all") -> float:
        """Return a part's time as a fraction of the whole dense backbone's, the median of the repeats."""
        return median_ratio([each[part] for each in self.passes], [each["all"] for each in dense.passes])


def smooth_images(batch: int, height: int, width: int) -> Tensor:
    """Return smooth random images (B, 3, H, W) with a little noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(batch, 3, max(2, height // 64), max(2, width // 64), generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)
    return smooth + 0.1 * torch.randn(smooth.shape, generator=generator)


def backbone(size: str, image: Sequence[int], watch: Parts) -> Any:
    """Build a ViT-Adapter in evaluation mode with random weights, its parts watched."""
    from agglo.lab.tasks.detection.model.adapter import ViTAdapter
    from agglo.lab.tasks.detection.model.vit import plain_vit

    torch.manual_seed(0)
    adapter = ViTAdapter(plain_vit(size), nominal_size=(image[0], image[1])).eval()
    for module in (adapter.vit.patch_embed, adapter.prior, adapter.up, *adapter.norms):
        watch.watch(module, "convolutions")
    for interaction in adapter.interactions:
        for module in (interaction.injector, *interaction.extractors):  # type: ignore[misc]
            watch.watch(module, "interactions")
    return adapter


def measure(
    adapter: Any, contenders: Sequence[Contender], images: Tensor, repeats: int, watch: Parts
) -> Iterator[Contender]:
    """Run all contenders in turns, one turn more than is kept to warm up; yield after every pass."""
    for repeat, order in turns(contenders, repeats):
        for contender in order:
            if contender.config is None:
                remove(adapter)
            else:
                method = timed(contender.config.create_method(), watch)
                apply(adapter, method, keep_rate=contender.config.keep_rate)
            watch.seconds = dict.fromkeys(PARTS, 0.0)
            whole, _ = timed_pass(adapter, images)
            parts = {**watch.seconds, "blocks": whole - sum(watch.seconds.values()), "all": whole}
            if repeat >= 0:
                contender.passes.append(parts)
            yield contender
    remove(adapter)


def describe(adapter: Any, contender: Contender) -> None:
    """Note the token counts and GFLOPs of a contender."""
    apply(adapter, ReductionConfig(keep_rate=1.0) if contender.config is None else contender.config)
    found = report(adapter)
    assert found is not None
    contender.counts = found.counts
    contender.gflops = found.gflops_before if found.gflops_after is None else found.gflops_after
    remove(adapter)


def run(options: Options) -> None:
    """Time all contenders, print a table and write the record."""
    where = machine()
    configs = configs_of(options.method, keep_rates=options.keep_rate)
    contenders = [Contender(), *(Contender(str(config.create_method()), config) for config in configs)]
    watch = Parts()
    with torch_threads(options.threads):
        where["threads"] = torch.get_num_threads()
        adapter = backbone(options.size, options.image, watch)
        for contender in contenders:
            describe(adapter, contender)
        images = smooth_images(options.batch_size, *options.image)
        with progress(len(contenders) * (options.repeats + 1), "bench adapter") as advance:
            for contender in measure(adapter, contenders, images, options.repeats, watch):
                advance(contender.name)
    kept = ("size", "image", "batch_size", "method", "keep_rate", "repeats")
    assert contenders[0].counts is not None
    n_tokens = contenders[0].counts[0]
    memory = {linkage: peak_memory(n_tokens, linkage, of_tokens=True) for linkage in LINKAGES}
    record = {
        "machine": where,
        "settings": {name: getattr(options, name) for name in kept},
        "tokens": n_tokens,
        "results": results(contenders),
        "clustering_memory_in_matrices": memory,
    }
    conclude(record, table(contenders), options.json)
    grown = ", ".join(f"{linkage} {'unknown' if v is None else format(v, '.2f')}" for linkage, v in memory.items())
    print(f"clustering {n_tokens} tokens takes so many N x N float32 matrices: {grown}")


def results(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Return what the JSON file holds of each contender."""
    dense = contenders[0]
    return [
        {
            "name": contender.name,
            "keep_rate": None if contender.config is None else contender.config.keep_rate,
            "counts": contender.counts,
            "gflops": contender.gflops,
            "to_dense": {part: contender.to_dense(dense, part) for part in (*PARTS, "all")},
            "passes": contender.passes,
        }
        for contender in contenders
    ]


def table(contenders: Sequence[Contender]) -> Table:
    """Return the milliseconds of each part, and the fractions of all of it and the method of the dense backbone."""
    dense = contenders[0]
    columns = [Column("backbone", left=True), Column("keep rate", left=True), Column("GFLOPs", ".1f")]
    columns += [Column(f"{part}, ms", ".1f") for part in (*PARTS, "all")]
    columns += [Column("method of dense", ".1%"), Column("all of dense", ".1%")]
    rows = [
        [
            contender.name,
            "" if contender.config is None else f"{contender.config.keep_rate:g}",
            contender.gflops,
            *(median(each[part] for each in contender.passes) * 1e3 for part in (*PARTS, "all")),
            contender.to_dense(dense, "method"),
            contender.to_dense(dense),
        ]
        for contender in contenders
    ]
    return Table(columns, rows)
