"""Images per second of one model: dense, reduced by each method, and reduced for free.

"free" leaves the same token counts by slicing, which costs nothing and decides nothing: the ceiling of every method.
All variants take turns within every repeat, so that a machine that slows down slows all of them; ratios are taken
within a repeat. "dense again" is the dense model a second time: what its ratio is off 1 is noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from agglo.classification.data.transforms import inputs_for
from agglo.experiments.devices import dtype_named, require_device, torch_threads
from agglo.experiments.evaluation.turns import seconds_per_pass
from agglo.experiments.files import require_output, write_json
from agglo.experiments.machine import machine
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.progress import progress
from agglo.experiments.slicing import Slice
from agglo.experiments.variants import Variant, variants_of
from agglo.patching import reduction, remove
from agglo.schedule import Schedule, as_schedule

_LEAST_SECONDS = 0.25  # a timing shorter than this runs the model several times


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: every method at every keep rate and schedule. There is no threshold: how many tokens it leaves
    depends on the pictures, and here they are noise.

    schedules: as text or as values. linkages: None is the methods' default. threads: None leaves torch as it is.
    """

    model: ModelSpec
    batch_size: int = 64
    keep_rates: Sequence[float] = (0.5, 0.25)
    schedules: Sequence[str | Schedule] = ()
    methods: Sequence[str] = ("tome", "atc")
    linkages: Sequence[str] | None = None
    repeats: int = 7
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"

    def described(self) -> dict[str, Any]:
        """For the record."""
        spec = self.model
        described = {**asdict(self), "model": spec.name, "checkpoint": spec.checkpoint and spec.checkpoint.name}
        schedules = [str(as_schedule(schedule)) for schedule in self.schedules]
        return {**described, "schedules": schedules, "pretrained": spec.pretrained, "image_size": spec.image_size}


def _budget(variant: Variant | None) -> dict[str, Any]:
    """keep_rate and schedule of a variant, for the record; both None for the dense model."""
    budget = {} if variant is None else variant.budget
    return {name: budget.get(name) for name in ("keep_rate", "schedule")}


@dataclass
class Measurement:
    """One variant. counts: patch tokens left after each block; images_per_second: one value per repeat."""

    name: str
    counts: list[int]
    gflops: float
    variant: Variant | None = None
    images_per_second: list[float] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.name if self.variant is None else f"{self.name}, {self.variant.budget_text}"

    @property
    def budget(self) -> dict[str, Any]:
        return _budget(self.variant)

    def against(self, other: Measurement) -> float:
        """How many times as fast as another: the median of the ratios within each repeat."""
        pairs = zip(self.images_per_second, other.images_per_second, strict=True)
        return median(mine / its for mine, its in pairs)


@dataclass
class Report:
    """machine, settings: where and what. skipped: variants that cannot run, and why."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    measurements: list[Measurement]
    skipped: list[dict[str, Any]]

    @property
    def dense(self) -> Measurement:
        return self.measurements[0]

    @property
    def noise(self) -> float:
        """The furthest that the dense model was off its own speed in any repeat, as a fraction."""
        again = self.measurements[1]
        pairs = zip(again.images_per_second, self.dense.images_per_second, strict=True)
        return max(abs(a / b - 1) for a, b in pairs)

    def free(self, budget: dict[str, Any]) -> Measurement | None:
        """The ceiling at a budget; None for the dense model."""
        found = [m for m in self.measurements if m.name == Slice.name and m.budget == budget]
        return found[0] if found else None

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file holds; the statistics can be computed again from images_per_second."""
        results = []
        for m in self.measurements:
            free = self.free(m.budget)
            results.append(
                {
                    "name": m.name,
                    **m.budget,
                    "method": None if m.variant is None else m.variant.method_text,
                    "counts": m.counts,
                    "gflops": m.gflops,
                    "median": median(m.images_per_second),
                    "min": min(m.images_per_second),
                    "max": max(m.images_per_second),
                    "to_dense": m.against(self.dense),
                    "to_free": None if free is None else m.against(free),
                    "images_per_second": m.images_per_second,
                }
            )
        parts = {"machine": self.machine, "settings": self.settings, "noise": self.noise}
        return {**parts, "results": results, "skipped": self.skipped}


def run(settings: BenchSettings, json_path: Path | None = None) -> Report:
    """Measure, writing the JSON file after every repeat."""
    if json_path is not None:
        require_output(json_path)
    reductions = _reductions(settings)
    device, dtype = require_device(settings.device), dtype_named(settings.dtype)
    with torch_threads(settings.threads):
        model = build(settings.model).to(device, dtype)
        wanted = inputs_for(model)
        generator = torch.Generator().manual_seed(0)
        shape = (settings.batch_size, len(wanted.mean), *wanted.image_size)
        inputs = torch.rand(shape, generator=generator).to(device, dtype)
        measurements, skipped = _contenders(model, reductions)
        report = Report(machine(device), settings.described(), measurements, skipped)
        with progress(len(measurements) * (settings.repeats + 1), "bench model") as advance:
            turns = []
            for measurement in _in_turn(measurements):
                turns.append((measurement, _warm_up(model, inputs, measurement.variant)))
                advance(f"warm-up: {measurement.title}")
            for repeat in range(settings.repeats):
                # There and back, so that nobody always runs in the wake of the same other.
                for measurement, passes in turns if repeat % 2 == 0 else reversed(turns):
                    _apply(model, measurement.variant)
                    measurement.images_per_second.append(len(inputs) / _seconds(model, inputs, passes))
                    advance(f"repeat {repeat + 1}: {measurement.title}")
                if json_path is not None:
                    write_json(json_path, report.as_dict())
    return report


def _reductions(settings: BenchSettings) -> list[Variant]:
    """Free reduction and then every method, budget by budget; ValueError for settings that make no sense."""
    for name, least in (("batch_size", 1), ("repeats", 1), ("threads", 1)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    of_methods = variants_of(
        settings.methods,
        keep_rates=settings.keep_rates,
        schedules=settings.schedules,
        linkages=settings.linkages,
    )
    if not of_methods:
        raise ValueError("nothing to measure: give at least one keep rate or schedule")
    reductions = []
    for _, group in groupby(of_methods, key=lambda variant: variant.budget):
        alike = list(group)
        reductions += [replace(alike[0], name=Slice.name, method=Slice(), proportional=False), *alike]
    return reductions


def _contenders(model: nn.Module, reductions: Sequence[Variant]) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """The dense model twice and every reduction it can take, with token counts; and those it cannot take."""
    reduced: list[Measurement] = []
    skipped: list[dict[str, Any]] = []
    dense: list[Measurement] = []
    for variant in reductions:
        try:
            variant.apply(model)
        except ValueError as error:
            if isinstance(variant.method, Slice):
                raise  # no method could
            skipped.append({"name": variant.name, **_budget(variant), "reason": str(error)})
            continue
        found = reduction(model)
        assert found is not None
        assert found.counts is not None
        assert found.gflops_after is not None
        reduced.append(Measurement(variant.name, found.counts, found.gflops_after, variant))
        full = [found.n_tokens] * len(found.counts)
        dense = [Measurement(name, full, found.gflops_before) for name in ("dense", "dense again")]
    return dense + reduced, skipped


def _in_turn(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The dense model first and last: only so far apart does it meet the noise that the others meet."""
    dense, again, *reduced = measurements
    return [dense, *reduced, again]


def _apply(model: nn.Module, variant: Variant | None) -> None:
    if variant is None:
        remove(model)
    else:
        variant.apply(model)


def _warm_up(model: nn.Module, inputs: Tensor, variant: Variant | None) -> int:
    """Run until caches and compiled kernels are in place; how many passes make a timing of decent length."""
    _apply(model, variant)
    _seconds(model, inputs, 1)
    return max(1, math.ceil(_LEAST_SECONDS / _seconds(model, inputs, 1)))


def _seconds(model: nn.Module, inputs: Tensor, passes: int) -> float:
    return seconds_per_pass(lambda: model(inputs), inputs.device, passes)
