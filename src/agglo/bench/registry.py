"""Everything that can be timed: `agglo bench <name>`.

A benchmark is a module of this room with

    add_arguments(parser)   what a person may choose
    run(arguments)          measure, print a table, write JSON where asked

`model` shares its arguments with other commands, so `cli/bench.py` reads them.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class Benchmark(NamedTuple):
    """about: one line for the list of benchmarks."""

    name: str
    about: str
    module: str

    def load(self) -> ModuleType:
        return import_module(f"agglo.bench.{self.module}")


BENCHMARKS = (
    Benchmark("model", "images per second: dense, ToMe, ATC, and the ceiling where reduction is free", "model"),
    Benchmark("diffusion", "a step of Stable Diffusion 1.5: dense, tomesd, and agglo's options", "diffusion"),
    Benchmark("vlm", "a vision-language model's time to its first token, with all and fewer image tokens", "vlm"),
    Benchmark("clustering", "the clustering alone against scikit-learn, SciPy and fastcluster", "clustering"),
    Benchmark("methods", "one reduction stage of every method without parameters, against ToMe", "methods"),
    Benchmark("adapter", "a detector's backbone part by part: dense, and reduced at several keep rates", "adapter"),
    Benchmark(
        "playground", "how long a move of the slider of agglo play takes, from the request to the groups", "playground"
    ),
    Benchmark("centroids", "average linkage without a distance matrix: why it is not used", "centroids"),
    Benchmark("gpu-roofline", "how long the GPU kernel should take, by counted rounds; runs on a CPU", "gpu_roofline"),
)
