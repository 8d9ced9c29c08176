"""A detector's backbone part by part: dense, and reduced by several methods at several keep rates.

The parts are timed where they run, within one forward pass:

    convolutions   patch embedding, spatial prior, and what makes the four maps at the end
    interactions   injectors and extractors, which see all patches whatever was merged
    method         the decision what to merge, with all comparisons of tokens
    blocks         all that is left: the ViT's blocks, merging and unmerging

Weights are random; the image is smooth, as photos are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from agglo.config import ReductionConfig
from agglo.lab.bench import PartClock, TimingOptions, conclude, in_turns, page, smooth_images
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.evaluation.grid import Reducible
from agglo.lab.options import AtLeastOne, option
from agglo.patch import apply, remove
from agglo.utils.devices import torch_threads
from agglo.utils.machine import machine
from agglo.utils.tables import Column, Table
from agglo.utils.timing import median_ratio, timed_pass

PARTS = ("convolutions", "interactions", "method", "blocks", "all")


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    size: Literal["tiny", "small"] = option("tiny", "of the ViT")
    image: tuple[int, int] = option((800, 1344), "pixels, multiples of 32", metavar=("H", "W"))
    batch_size: AtLeastOne = option(1, "images")
    method: Sequence[str] = option(("atc", "tome"), "by name, or as text such as atc:linkage=single", metavar="M")
    keep_rate: Sequence[float] = option((0.9, 0.7, 0.5), "fraction of patch tokens that stays", metavar="R")
    repeats: AtLeastOne = 3


def backbone(size: str, image: Sequence[int], parts: PartClock) -> Any:
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
    """Time all contenders, print a table and write the record."""
    reductions = configs_of(options.method, keep_rates=options.keep_rate)
    parts = PartClock()
    with torch_threads(options.threads):
        where = machine()
        adapter = backbone(options.size, options.image, parts)
        images = smooth_images(options.batch_size, 3, *options.image)

        def seconds(config: ReductionConfig | None, repeat: int) -> dict[str, float]:
            remove(adapter)
            if config is not None:
                method: Any = config.create_method()
                method.reduce = parts.timed(method.reduce, "method")
                apply(adapter, method, keep_rate=config.keep_rate)
            parts.clear()
            whole, _ = timed_pass(adapter, images)
            return {"method": 0.0, "blocks": whole - sum(parts.values()), "all": whole, **parts}

        passes = in_turns("adapter", [None, *reductions], seconds, options.repeats)
    cells = Reducible(adapter, None, "random weights").cells(reductions, dense=True)
    whole = [each["all"] for each in passes[0]]
    results = [
        {
            "name": "dense" if cell.config is None else str(cell.config.create_method()),
            "keep_rate": cell.config and cell.config.keep_rate,
            "counts": cell.about["counts"],
            "gflops": cell.about["gflops"],
            "to_dense": {part: median_ratio([each[part] for each in own], whole) for part in PARTS},
            "passes": own,
        }
        for cell, own in zip(cells, passes, strict=True)
    ]
    record = {"machine": where, "settings": options.settings(), "tokens": results[0]["counts"][0], "results": results}
    conclude(record, describe(record), options.json)


def describe(record: Mapping[str, Any]) -> str:
    """Return the milliseconds of each part, and the fractions of all of it and the method of the dense backbone."""
    columns = [Column("backbone", left=True), Column("keep rate", "g", left=True), Column("GFLOPs", ".1f")]
    columns += [Column(f"{part}, ms", ".1f") for part in PARTS]
    columns += [Column("method of dense", ".1%"), Column("all of dense", ".1%")]
    rows = []
    for found in record["results"]:
        times = [median(each[part] for each in found["passes"]) * 1e3 for part in PARTS]
        ratios = found["to_dense"]
        rows.append([found["name"], found["keep_rate"], found["gflops"], *times, ratios["method"], ratios["all"]])
    return page(record, f"A backbone of {record['tokens']} tokens with random weights", Table(columns, rows))
