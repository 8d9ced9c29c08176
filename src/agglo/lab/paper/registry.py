"""All that can be measured: items, in the order of the paper, and benchmarks.

An item has cells, a record and tables that lie in results/: `agglo reproduce ITEM`. A new one is listed in its module's
ITEMS, and the module here. A benchmark times what a person chooses, here and now: `agglo bench NAME`. It is a module of
the room `bench` with

    Options        a dataclass: what a person may choose
    run(options)   measure, print a table, write JSON where asked
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from agglo.checks import choice
from agglo.lab.paper.study import Study

MODULES: tuple[str, ...] = (
    *("fine_tuned", "ranking", "hyper_parameters", "off_the_shelf", "per_block"),
    *("diffusion_fid", "diffusion_samples", "detection", "clusters", "throughput"),
)


class Benchmark(NamedTuple):
    """A command of `agglo bench` and module of the room `bench`, with one line for lists."""

    name: str
    about: str

    def load(self) -> ModuleType:
        return import_module(f"agglo.lab.bench.{self.name}")


BENCHMARKS = (
    Benchmark("model", "images per second: dense, ToMe, ATC, and the ceiling where reduction is free"),
    Benchmark("diffusion", "a step of Stable Diffusion 1.5: dense, tomesd, and agglo's options"),
    Benchmark("vlm", "a vision-language model's time to its first token, with all and fewer image tokens"),
    Benchmark("clustering", "the clustering alone against scikit-learn, SciPy and fastcluster"),
    Benchmark("methods", "one reduction stage of every method without parameters, against ToMe"),
    Benchmark("adapter", "a detector's backbone part by part: dense, and reduced at several keep rates"),
)


@cache
def items() -> dict[str, Study]:
    """Return all items by name."""
    found = [item for module in MODULES for item in import_module(f"agglo.lab.paper.items.{module}").ITEMS]
    return {item.name: item for item in found}


def item_named(name: str) -> Study:
    if any(name == benchmark.name for benchmark in BENCHMARKS):
        raise ValueError(f"item={name!r} is a benchmark: agglo bench {name}")
    return items()[choice("item", name, items())]
