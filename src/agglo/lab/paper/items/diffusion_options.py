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
from agglo.lab.paper.classifiers import FASHION
from agglo.lab.paper.compare import grouped
from agglo.lab.paper.study import BEYOND, Cell, Result, RunCell, Section, Settings, Study
from agglo.lab.paper.synthesis import (
    EMBEDDED_CALL,
    FULL,
    MINIATURE,
    GeneratorScale,
    Ways,
    about_generator,
    all_ways,
    by_rate,
    compared_cells,
    open_generator,
    renamed,
    ways_of,
)
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.cells import DENSE, cells_of
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell as Way
from agglo.lab.tasks.synthesis.evaluation.errors import prediction_errors, relative_errors
from agglo.lab.tasks.synthesis.evaluation.generators import Generator
from agglo.patch import remove
from agglo.utils.progress import progress
from agglo.utils.randomness import generator as random_generator
from agglo.utils.timing import median_ratio, seconds_in_turns, seconds_per_pass

PREDICTION, SAMPLING, TIME = "prediction", "sampling", "time"
LEVELS = (200, 500, 800)  # of 1000 steps
_BATCH = 16  # images of a call that is timed
_CLASSES = range(0, 1000, 20)  # of ImageNet, that are sampled, one picture each


def _requests(scale: GeneratorScale) -> list[Request]:
    return scale.requests(99, None if scale.embedded else _CLASSES)


def _axes(scale: GeneratorScale, settings: Settings) -> Iterator[Cell]:
    sampling = len(_requests(scale)) * scale.image_cost
    parts: list[tuple[str, Any, float]] = [(SAMPLING, sampled_ways(scale.keep_rates), sampling)]
    needs = scale.generator_needs
    if scale.embedded:
        needs = scale.data_needs
        compared = ways_of(compared_cells(scale.keep_rates))
        calls = _BATCH * scale.rounds * len(all_ways(scale))
        parts = [
            (PREDICTION, compared, scale.predicted * len(LEVELS) * EMBEDDED_CALL),
            *parts,
            (TIME, [(None, None)], calls * EMBEDDED_CALL),
        ]
    for part, ways, cost in parts:
        for method, rate in ways:
            yield Cell({"part": part, "method": method, "keep_rate": rate}, needs, cost)


def _run(scale: GeneratorScale, settings: Settings) -> RunCell:
    generator = cache(lambda: open_generator(settings, scale))
    ways, requests = sampled_ways(scale.keep_rates), _requests(scale)
    size = settings.batch_size or (len(requests) if scale.embedded else scale.batch_size)
    dense = cache(lambda: sampled(generator(), Way(DENSE), requests, size))
    calls = cache(lambda: predictions(generator(), settings.data[FASHION], scale.predicted))

    def run(cell: Mapping[str, Any]) -> dict[str, Any]:
        about = about_generator(generator())
        if cell["part"] == TIME:
            rows = times(generator(), all_ways(scale), scale.rounds)
            return {"batch": _BATCH, "rounds": scale.rounds, "rows": rows, **about}
        way = ways[cell["method"], cell["keep_rate"]]
        if cell["part"] == PREDICTION:
            [by_level] = prediction_errors(generator().reduced, [way], calls()).values()
            found = {"error": float(np.mean(by_level)), "by_level": by_level, "images": scale.predicted}
            return {**found, "levels": LEVELS, **about}
        errors = relative_errors(sampled(generator(), way, requests, size), dense())
        return {"error": float(errors.mean()), "images": len(requests), **about}

    return run


def sampled_ways(keep_rates: Sequence[float]) -> Ways:
    """Return all that single predictions are compared with, and groups that are kept from step to step."""
    kept: dict[str, dict[str, Any]] = {
        "atc-average, kept for 5 steps": {"every": 5},
        "atc-average, kept until features moved by 0.3": {"drift": 0.3},
        "atc-average, shared by the blocks, kept for 5 steps": {"every": 5, "share": "resolution"},
    }
    more = [cell for name, how in kept.items() for cell in renamed(name, cells_of(["atc"], keep_rates, common=how))]
    return ways_of([*compared_cells(keep_rates), *more])


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


def sampled(generator: Generator, way: Way, requests: Sequence[Request], batch_size: int) -> Tensor:
    """Return the images that whole samplings end with, (B, H, W) or (B, H, W, 3)."""
    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    images = []
    way.apply(generator.reduced)
    try:
        with progress(len(batches), way.name, every_seconds=10) as tell:
            for batch in batches:
                torch.manual_seed(0)  # methods that draw draw the same for every way
                images += [torch.from_numpy(np.asarray(image).copy()) for image in generator(batch)]
                tell("")
    finally:
        remove(generator.reduced)
    return torch.stack(images)


@torch.no_grad()
def times(generator: Generator, ways: Ways, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds per image of one call of the embedded model, in turns.

    The median, and each in proportion to the dense call of the same round.
    """
    noisy = embedded.starting_noise(range(_BATCH))
    steps, classes = torch.full((_BATCH,), 500), torch.arange(_BATCH) % embedded.N_CLASSES

    def seconds(way: Any) -> float:
        way.apply(generator.reduced)
        return seconds_per_pass(lambda: generator.reduced(noisy, steps, classes))

    with progress((rounds + 1) * len(ways), "times", every_seconds=10) as tell:
        runs = [partial(seconds, way) for way in ways.values()]
        taken = seconds_in_turns(runs, rounds, after=lambda: tell(""))
    return [
        {
            "method": method,
            "keep_rate": rate,
            "ms_per_image": 1000 * median(own) / _BATCH,
            "of_dense": median_ratio(own, taken[0]),
        }
        for (method, rate), own in zip(ways, taken, strict=True)
    ]


def _table(results: Sequence[Result], scale: GeneratorScale) -> list[Section]:
    found = []
    for (part,), here in grouped(results, "part").items():
        first = here[0]
        if part == TIME:
            title = "Time of one call of the model in proportion to the dense one's"
            dense, *here = first["rows"]
            text = f"In turns; dense {dense['ms_per_image']:.1f} ms per image, of {first['batch']} at a time."
            table = by_rate(here, lambda row: f"{row['of_dense']:.2f}")
        else:
            title = "Relative error of the picture after all steps against the dense one's (%)"
            text = f"{first['images']} pictures."
            table = by_rate(here, lambda result: f"{100 * result['error']:.1f}")
        if part == PREDICTION:
            title = "Relative error of a prediction against the dense one (%)"
            steps = ", ".join(map(str, first["levels"]))
            text = f"{first['images']} test images, mean over steps {steps} of 1000."
        found.append(Section(title, table, text))
    return found


DIFFUSION_OPTIONS = Study(
    name="diffusion-options",
    shows=BEYOND,
    about="How far a sampling of Stable Diffusion 1.5 ends from the dense one, for every option of merging: keys or "
    "block inputs, proportional attention, linkages, windows, neighbours only, groups shared or kept for steps",
    stands_in="The embedded generator stands in, and single predictions and times of a call are measured beside "
    "samplings.",
    full=replace(FULL, per_class=1),
    miniature=replace(MINIATURE, per_class=5),
    axes=_axes,
    run=_run,
    table=_table,
)
ITEMS = (DIFFUSION_OPTIONS,)
