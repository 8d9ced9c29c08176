"""One reduction stage of every parameter-free method, from the block's tokens, keys and attention to the new tokens.

Methods run in turns, so that whatever else the machine does slows all alike; ratios are medians of the ratios to ToMe
within a turn. What a host computes for a method beforehand (keys, attention) is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agglo.bench.clustering import spatial_tokens
from agglo.experiments.devices import torch_threads
from agglo.experiments.files import require_output, write_json
from agglo.experiments.machine import load_warning, machine
from agglo.experiments.tables import Column, Table
from agglo.methods import Method, View, create, list_methods

HEADS = 3
_WARM_UP = 2  # turns that are not kept
EQUAL = {"dpc_knn": {"weights": "equal"}}  # learns otherwise
VARIANTS: list[tuple[str, dict[str, Any]]] = [("kmedoids", {"weights": "equal"}), ("kmedoids", {"released": True})]


def parameter_free() -> list[Method]:
    # Methods whose tokens skip blocks and return have no stage to time: they decide at every block, with a memory.
    stages = [info for info in list_methods() if info.kind != "skips"]
    names = [info.name for info in stages if not info.learns or info.name in EQUAL]
    return [create(name, **EQUAL.get(name, {})) for name in names] + [create(n, **o) for n, o in VARIANTS]


def shown(batch: int, n: int, dim: int, target: int) -> View:
    """Tokens that resemble their neighbours, as a class token and n patches at the second stage of a model."""

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


def stage(method: Method, view: View) -> Callable[[], Tensor]:
    """The reduction as the loop over blocks runs it, to the count nearest to the target that the method reaches."""
    assert view.target is not None
    view = replace(view, target=method.stages(view.patches.shape[1], [view.target], view.grid)[0])

    def run() -> Tensor:
        return method.reduce(view).new_tokens(view.tokens)

    return run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=196, help="patch tokens, a square number")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--target", type=int, help="patch tokens to leave; half of them by default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of torch; as it is by default")
    parser.add_argument("--json", type=Path, metavar="F", help="every timing, the machine and the settings")


def run(arguments: argparse.Namespace) -> None:
    if arguments.repeats < 1 or arguments.batch_size < 1:
        raise ValueError(f"repeats={arguments.repeats} and batch_size={arguments.batch_size} must be at least 1")
    if arguments.json is not None:
        require_output(arguments.json)
    settings = {name: getattr(arguments, name) for name in ("batch_size", "tokens", "dim", "target", "repeats")}
    settings["target"] = settings["target"] or settings["tokens"] // 2
    view = shown(settings["batch_size"], settings["tokens"], settings["dim"], settings["target"])
    stages = {repr(method): stage(method, view) for method in parameter_free()}
    with torch_threads(arguments.threads):
        where = machine()
        taken = in_turns(stages, arguments.repeats)
    results = [{"name": name, "milliseconds": milliseconds} for name, milliseconds in taken.items()]
    record = {"machine": where, "settings": settings, "reference": repr(create("tome")), "results": results}
    if arguments.json is not None:
        write_json(arguments.json, record)
    if (busy := load_warning(where)) is not None:
        print(busy)
    print(where)
    print(table(record).markdown())


@torch.inference_mode()
def in_turns(stages: Mapping[str, Callable[[], Tensor]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every stage in every turn that is kept."""
    taken: dict[str, list[float]] = {name: [] for name in stages}
    for turn in range(_WARM_UP + repeats):
        for name, reduce in stages.items():
            begin = time.perf_counter()
            reduce()
            milliseconds = (time.perf_counter() - begin) * 1e3
            if turn >= _WARM_UP:
                taken[name].append(milliseconds)
    return taken


def table(record: Mapping[str, Any]) -> Table:
    """Medians, the quickest first, and how many times as long as ToMe a method took in the same turn."""
    taken: dict[str, Sequence[float]] = {result["name"]: result["milliseconds"] for result in record["results"]}
    tome = taken[record["reference"]]
    rows = [
        [name, median(mine), median(one / its for one, its in zip(mine, tome, strict=True))]
        for name, mine in sorted(taken.items(), key=lambda item: median(item[1]))
    ]
    return Table([Column("method", left=True), Column("ms", ".1f"), Column("to ToMe", ".2f")], rows)
