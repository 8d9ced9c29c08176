"""Not in the paper: every option of merging in a diffusion model, by how far it leads from the dense model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.embedded import generator as embedded
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.paper import synthesis
from agglo.lab.paper.classifiers import FASHION
from agglo.lab.paper.compare import DENSE, grouped
from agglo.lab.paper.study import BEYOND, Cell, Result, RunCell, Section, Settings, Study
from agglo.lab.paper.synthesis import COMPARED, FULL, MINIATURE, GeneratorScale, Options, Reductions
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell
from agglo.lab.tasks.synthesis.evaluation.errors import prediction_errors, relative_errors
from agglo.lab.tasks.synthesis.evaluation.generators import Generator
from agglo.patch import remove
from agglo.utils.randomness import generator as random_generator
from agglo.utils.timing import median_ratio, seconds_in_turns, seconds_per_pass

PREDICTION, SAMPLING, TIME = "prediction", "sampling", "time"
LEVELS = (200, 500, 800)  # of 1000 steps
_BATCH = 16  # images of a call that is timed
_CLASSES = range(0, 1000, 20)  # of ImageNet, that are sampled, one picture each
# Whole samplings are also compared with groups that are kept from step to step.
SAMPLED: Options = {
    **COMPARED,
    "atc-average, kept for 5 steps": {"every": 5},
    "atc-average, kept until features moved by 0.3": {"drift": 0.3},
    "atc-average, shared by the blocks, kept for 5 steps": {"every": 5, "share": "resolution"},
}


def _axes(scale: GeneratorScale, settings: Settings) -> Iterator[Cell]:
    """Yield single predictions and times for the embedded generator alone."""
    needs = scale.data_needs if scale.embedded else scale.generator_needs
    sampled = synthesis.reductions(SAMPLED, scale.keep_rates)
    parts: dict[str, Any] = {SAMPLING: sampled}
    if scale.embedded:
        compared = [key for key in sampled if key[0] in COMPARED]
        parts = {PREDICTION: compared, **parts, TIME: [(None, None)]}
    for part, keys in parts.items():
        for method, rate in keys:
            yield Cell({"part": part, "method": method, "keep_rate": rate}, needs)


def _run(scale: GeneratorScale, settings: Settings) -> RunCell:
    generator = cache(lambda: synthesis.open_generator(settings, scale))
    cells = synthesis.reductions(SAMPLED, scale.keep_rates)
    requests = scale.requests(99, None if scale.embedded else _CLASSES)
    size = settings.batch_size or (len(requests) if scale.embedded else scale.batch_size)
    dense = cache(lambda: sampled(generator(), GenerationCell(DENSE), requests, size))
    calls = cache(lambda: predictions(generator(), settings.data[FASHION], scale.predicted))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        source = synthesis.sources(generator())
        if about["part"] == TIME:
            rows = times(generator(), scale.reductions, scale.rounds)
            return {"batch": _BATCH, "rounds": scale.rounds, "rows": rows, **source}
        cell = cells[about["method"], about["keep_rate"]]
        if about["part"] == PREDICTION:
            [by_level] = prediction_errors(generator().reduced, [cell], calls()).values()
            found = {"error": float(np.mean(by_level)), "by_level": by_level, "images": scale.predicted}
            return {**found, "levels": LEVELS, **source}
        errors = relative_errors(sampled(generator(), cell, requests, size), dense())
        return {"error": float(errors.mean()), "images": len(requests), **source}

    return run


def predictions(generator: Generator, data: Path, n_images: int) -> list[Callable[[], Tensor]]:
    """Return calls of the embedded model on noised test images, one for each level."""
    from diffusers import DDPMScheduler

    images, labels = read_split(data, "val")
    clean = embedded.to_model(torch.from_numpy(images[:n_images].copy())[:, None])
    classes = torch.from_numpy(labels[:n_images].copy()).long()

    def prediction(level: int) -> Callable[[], Tensor]:
        steps = torch.full((len(clean),), level)
        noise = torch.randn(clean.shape, generator=random_generator("mini-synthesis", level))
        noisy = DDPMScheduler(**embedded.NOISE).add_noise(clean, noise, steps)
        return lambda: generator.reduced(noisy, steps, classes).sample

    return [prediction(level) for level in LEVELS]


def sampled(generator: Generator, cell: GenerationCell, requests: Sequence[Request], batch_size: int) -> Tensor:
    """Return the images that whole samplings end with, (B, H, W) or (B, H, W, 3)."""
    images = []
    cell.apply(generator.reduced)
    try:
        for start in range(0, len(requests), batch_size):
            torch.manual_seed(0)  # methods that draw draw the same for every cell
            made = generator(requests[start : start + batch_size])
            images += [torch.from_numpy(np.asarray(image).copy()) for image in made]
    finally:
        remove(generator.reduced)
    return torch.stack(images)


@torch.no_grad()
def times(generator: Generator, cells: Reductions, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds per image of one call of the embedded model, in turns.

    The median, and each in proportion to the dense call of the same round.
    """
    noisy = embedded.starting_noise(range(_BATCH))
    steps, classes = torch.full((_BATCH,), 500), torch.arange(_BATCH) % embedded.N_CLASSES

    def seconds(cell: GenerationCell) -> float:
        cell.apply(generator.reduced)
        return seconds_per_pass(lambda: generator.reduced(noisy, steps, classes))

    taken = seconds_in_turns([partial(seconds, cell) for cell in cells.values()], rounds)
    rows = []
    for (method, rate), own in zip(cells, taken, strict=True):
        relative = {"ms_per_image": 1000 * median(own) / _BATCH, "of_dense": median_ratio(own, taken[0])}
        rows.append({"method": method, "keep_rate": rate, **relative})
    return rows


def _table(results: Sequence[Result], scale: GeneratorScale) -> list[Section]:
    found = []
    for (part,), here in grouped(results, "part").items():
        first = here[0]
        if part == TIME:
            title = "Time of one call of the model in proportion to the dense one's"
            dense, *rows = first["rows"]
            text = f"In turns; dense {dense['ms_per_image']:.1f} ms per image, of {first['batch']} at a time."
            found.append(Section(title, synthesis.by_rate(rows, lambda row: f"{row['of_dense']:.2f}"), text))
            continue
        title = "Relative error of the picture after all steps against the dense one's (%)"
        text = f"{first['images']} pictures."
        if part == PREDICTION:
            title = "Relative error of a prediction against the dense one (%)"
            steps = ", ".join(map(str, first["levels"]))
            text = f"{first['images']} test images, mean over steps {steps} of 1000."
        table = synthesis.by_rate(here, lambda result: f"{100 * result['error']:.1f}")
        found.append(Section(title, table, text))
    return found


DIFFUSION_OPTIONS = Study(
    name="diffusion-options",
    shows=BEYOND,
    about="How far a sampling of Stable Diffusion 1.5 ends from the dense one, for every option of merging: keys or "
    "block inputs, proportional attention, linkages, windows, neighbours only, groups shared or kept for steps",
    stands_in="The embedded generator stands in, and single predictions and times of a call are measured beside "
    "samplings.",
    gpu_hours="5.4",
    full=replace(FULL, per_class=1),
    miniature=replace(MINIATURE, per_class=5),
    axes=_axes,
    run=_run,
    table=_table,
)
ITEMS = (DIFFUSION_OPTIONS,)
