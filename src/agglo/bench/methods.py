"""One reduction stage of every parameter-free method, from the block's tokens, keys and attention to the new tokens.

Methods run in turns, so that whatever else the machine does slows all alike; ratios are medians of the ratios to ToMe
within a turn. What a host computes for a method beforehand (keys, attention) is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agglo.bench.clustering import spatial_tokens
from agglo.experiments.devices import torch_threads
from agglo.experiments.machine import machine
from agglo.experiments.tables import Column, Table
from agglo.methods import Method, View, create, list_methods

HEADS = 3
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


def run(arguments: argparse.Namespace) -> None:
    view = shown(arguments.batch_size, arguments.tokens, arguments.dim, arguments.target or arguments.tokens // 2)
    stages = {repr(method): stage(method, view) for method in parameter_free()}
    reference = repr(create("tome"))
    times: dict[str, list[float]] = {name: [] for name in stages}
    with torch_threads(arguments.threads), torch.inference_mode():
        print(machine())
        for _ in range(arguments.repeats + 2):  # the first turns warm up
            for name, reduce in stages.items():
                begin = time.perf_counter()
                reduce()
                times[name].append(time.perf_counter() - begin)
    rows = []
    for name, all_times in sorted(times.items(), key=lambda item: median(item[1][2:])):
        ratio = median(mine / tome for mine, tome in zip(all_times[2:], times[reference][2:], strict=True))
        rows.append([name, median(all_times[2:]) * 1e3, ratio])
    print(Table([Column("method", left=True), Column("ms", ".1f"), Column("to ToMe", ".2f")], rows).markdown())
