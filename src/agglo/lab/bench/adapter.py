"""A detector's backbone part by part: dense, and reduced by several methods at several keep rates.

The parts are timed where they run, within one forward pass:

    convolutions   patch embedding, spatial prior, and what makes the four maps at the end
    interactions   injectors and extractors, which see all patches whatever was merged
    method         the decision what to merge, with all comparisons of tokens
    blocks         all that is left: the ViT's blocks, merging and unmerging

All contenders take turns within every repeat, there and back, so that a slow machine slows all of them; ratios
are taken within a repeat. Weights are random; the image is smooth, as photos are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.config import ReductionConfig
from agglo.lab.bench import TimingOptions, conclude
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.options import AtLeastOne, option
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


class Parts(dict[str, float]):
    """Seconds spent in each part of a pass."""

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the same callable, whose time is counted to a part."""

        def run(*inputs: Any, **options: Any) -> Any:
            with stopwatch() as taken:
                found = call(*inputs, **options)
            self[part] = self.get(part, 0.0) + taken.seconds
            return found

        return run


@dataclass
class Contender:
    """The dense backbone, or a method at a keep rate. passes: seconds of each part, and of all, of every pass."""

    name: str = "dense"
    config: ReductionConfig | None = None
    passes: list[dict[str, float]] = field(default_factory=list)

    def result(self, adapter: Any, dense: Contender) -> dict[str, Any]:
        """Return what the JSON file holds: to_dense are fractions of the whole dense backbone's time."""
        apply(adapter, self.config or ReductionConfig(keep_rate=1.0))
        found = report(adapter)
        assert found is not None
        whole = [each["all"] for each in dense.passes]
        return {
            "name": self.name,
            "keep_rate": None if self.config is None else self.config.keep_rate,
            "counts": found.counts,
            "gflops": found.gflops_before if self.config is None else found.gflops_after,
            "to_dense": {part: median_ratio([each[part] for each in self.passes], whole) for part in (*PARTS, "all")},
            "passes": self.passes,
        }


def smooth_images(batch: int, height: int, width: int) -> Tensor:
    """Return smooth random images (B, 3, H, W) with a little noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(batch, 3, max(2, height // 64), max(2, width // 64), generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)
    return smooth + 0.1 * torch.randn(smooth.shape, generator=generator)


def backbone(size: str, image: Sequence[int], parts: Parts) -> Any:
    """Build a ViT-Adapter in evaluation mode with random weights, its parts timed."""
    from agglo.lab.tasks.detection.model.adapter import ViTAdapter
    from agglo.lab.tasks.detection.model.vit import plain_vit

    torch.manual_seed(0)
    adapter: Any = ViTAdapter(plain_vit(size), nominal_size=(image[0], image[1])).eval()
    for module in (adapter.vit.patch_embed, adapter.prior, adapter.up, *adapter.norms):
        module.forward = parts.timed(module.forward, "convolutions")
    for interaction in adapter.interactions:
        for module in (interaction.injector, *interaction.extractors):
            module.forward = parts.timed(module.forward, "interactions")
    return adapter


def run(options: Options) -> None:
    """Time all contenders, one turn more than is kept to warm up; print a table and write the record."""
    where = machine()
    configs = configs_of(options.method, keep_rates=options.keep_rate)
    contenders = [dense := Contender(), *(Contender(str(config.create_method()), config) for config in configs)]
    parts = Parts()
    with torch_threads(options.threads):
        where["threads"] = torch.get_num_threads()
        adapter = backbone(options.size, options.image, parts)
        images = smooth_images(options.batch_size, *options.image)
        with progress(len(contenders) * (options.repeats + 1), "bench adapter") as advance:
            for repeat, order in turns(contenders, options.repeats):
                for contender in order:
                    remove(adapter)
                    if contender.config is not None:
                        method: Any = contender.config.create_method()
                        method.reduce = parts.timed(method.reduce, "method")
                        apply(adapter, method, keep_rate=contender.config.keep_rate)
                    parts.clear()
                    whole, _ = timed_pass(adapter, images)
                    if repeat >= 0:
                        rest = {"method": 0.0, "blocks": whole - sum(parts.values()), "all": whole}
                        contender.passes.append({**rest, **parts})
                    advance(contender.name)
    results = [contender.result(adapter, dense) for contender in contenders]
    record = {"machine": where, "settings": options.settings(), "tokens": results[0]["counts"][0], "results": results}
    conclude(record, f"{where}\n{table(results).markdown()}", options.json)


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return the milliseconds of each part, and the fractions of all of it and the method of the dense backbone."""
    columns = [Column("backbone", left=True), Column("keep rate", left=True), Column("GFLOPs", ".1f")]
    columns += [Column(f"{part}, ms", ".1f") for part in (*PARTS, "all")]
    columns += [Column("method of dense", ".1%"), Column("all of dense", ".1%")]
    rows = []
    for found in results:
        times = [median(each[part] for each in found["passes"]) * 1e3 for part in (*PARTS, "all")]
        rate = "" if found["keep_rate"] is None else f"{found['keep_rate']:g}"
        ratios = found["to_dense"]
        rows.append([found["name"], rate, found["gflops"], *times, ratios["method"], ratios["all"]])
    return Table(columns, rows)
