"""One reduction stage of every parameter-free method, from the block's tokens, keys and attention to the new tokens.

What a host computes for a method beforehand (keys, attention) is not timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agglo.lab.bench import TimingOptions, conclude, page
from agglo.lab.bench.clustering import spatial_tokens
from agglo.lab.options import AtLeastOne, option
from agglo.methods import Method, View, create, list_methods
from agglo.utils.devices import torch_threads
from agglo.utils.machine import machine
from agglo.utils.tables import Column, Table
from agglo.utils.timing import in_turns, median_ratio, seconds_per_pass

HEADS = 3
EQUAL = {"dpc_knn": {"weights": "equal"}}  # learns otherwise
VARIANTS: list[tuple[str, dict[str, Any]]] = [("kmedoids", {"weights": "equal"}), ("kmedoids", {"released": True})]


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    batch_size: AtLeastOne = option(64, "images")
    tokens: AtLeastOne = option(196, "patch tokens, a square number")
    dim: AtLeastOne = option(192, "channels")
    target: AtLeastOne | None = option(None, "patch tokens to leave (default: half of them)")
    repeats: AtLeastOne = 20


def parameter_free() -> list[Method]:
    # Methods whose tokens skip blocks and return have no stage to time: they decide at every block, with a memory.
    stages = [info for info in list_methods() if info.kind != "skips"]
    names = [info.name for info in stages if not info.learns or info.name in EQUAL]
    return [create(name, **EQUAL.get(name, {})) for name in names] + [create(n, **o) for n, o in VARIANTS]


def view_of(batch: int, n: int, dim: int, target: int) -> View:
    """Return tokens that resemble their neighbours, as a class token and n patches at the second stage of a model."""

    def sequence(width: int, seed: int) -> Tensor:
        patches = spatial_tokens(batch, n, width, seed)
        return torch.cat([patches.mean(dim=1, keepdim=True), patches], dim=1)

    generator = torch.Generator().manual_seed(0)
    keys, values = (sequence(dim, seed).view(batch, n + 1, HEADS, -1).transpose(1, 2) for seed in (1, 2))
    return View(
        tokens=sequence(dim, 0),
        keys=keys,
        values=values,
        class_attention=torch.rand(batch, HEADS, n + 1, generator=generator).softmax(dim=-1),
        sizes=torch.ones(batch, n + 1),
        counts=None,
        prefix=1,
        target=target,
        threshold=None,
        stage=0,
        training=False,
        attention_received=torch.rand(batch, n + 1, generator=generator),
        grid=(round(n**0.5), round(n**0.5)),
    )


def stage(method: Method, view: View) -> Tensor:
    """Reduce as the loop over blocks does, to the count nearest to the target that the method reaches."""
    assert view.target is not None
    view = replace(view, target=method.stages(view.patches.shape[1], [view.target], view.grid)[0])
    return method.reduce(view).new_tokens(view.tokens)


def run(options: Options) -> None:
    """Time every method, print a table and write the record."""
    target = options.target or options.tokens // 2
    view = view_of(options.batch_size, options.tokens, options.dim, target)
    stages = {repr(method): partial(stage, method, view) for method in parameter_free()}
    with torch_threads(options.threads):
        where = machine()
        taken = in_turns(list(stages.values()), lambda run, _: seconds_per_pass(run), options.repeats, warm_up=2)
    results = [{"name": n, "milliseconds": [1e3 * s for s in own]} for n, own in zip(stages, taken, strict=True)]
    record = {"machine": where, "settings": {**options.settings(), "target": target}, "results": results}
    record["reference"] = repr(create("tome"))
    conclude(record, describe(record), options.json)


def describe(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    what = (
        f"What a method itself takes to reduce {settings['batch_size']} images of {settings['tokens']} tokens "
        f"({settings['dim']} channels) to {settings['target']}, keys and attention given; medians of "
        f"{settings['repeats']} turns"
    )
    return page(record, what, table(record))


def table(record: Mapping[str, Any]) -> Table:
    """Return medians, the quickest first, and how many times as long as ToMe a method took in the same turn."""
    taken: dict[str, Sequence[float]] = {result["name"]: result["milliseconds"] for result in record["results"]}
    tome = taken[record["reference"]]
    rows = [[name, median(mine), median_ratio(mine, tome)] for name, mine in taken.items()]
    columns = [Column("method", left=True), Column("ms", ".1f"), Column("to ToMe", ".2f")]
    return Table(columns, sorted(rows, key=lambda row: row[1]))
