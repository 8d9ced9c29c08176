"""Not in the paper: every option of merging in a diffusion model, by how far it leads from the dense model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.embedded import generator as embedded
from agglo.experiments.fashion_mnist import read_split
from agglo.experiments.progress import progress
from agglo.experiments.randomness import generator as random_generator
from agglo.patching import remove
from agglo.reproduce.classifiers import FASHION, data_need
from agglo.reproduce.compare import beside, grouped, percent
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.items.beyond import BEYOND
from agglo.reproduce.synthesis import (
    APART,
    EMBEDDED_CALL,
    FULL,
    MINIATURE,
    PIPELINE,
    Scale,
    Ways,
    about_generator,
    compared_cells,
    image_cost,
    open_generator,
    own_ways,
    paper_ways,
    pipeline_need,
    renamed,
    ways_of,
)
from agglo.synthesis.data.requests import Request, fashion_requests, imagenet_requests
from agglo.synthesis.evaluation.cells import DENSE, cells_of
from agglo.synthesis.evaluation.cells import Cell as Way
from agglo.synthesis.evaluation.errors import prediction_errors, relative_errors
from agglo.synthesis.evaluation.generators import Generator

PREDICTION, SAMPLING, TIME = "prediction", "sampling", "time"
LEVELS = (200, 500, 800)  # of 1000 steps
_BATCH = 16  # images of a call that is timed
_CLASSES = range(0, 1000, 20)  # of ImageNet, that are sampled, one picture each


class DiffusionOptions(Item):
    name = "diffusion-options"
    shows = BEYOND
    about = (
        "How far a sampling of Stable Diffusion 1.5 ends from the dense one, for every option of merging: keys or "
        "block inputs, proportional attention, linkages, windows, neighbours only, groups shared or kept for steps"
    )
    miniature_about = (
        "The embedded generator stands in, and single predictions and times of a call are measured beside samplings."
    )

    def __init__(
        self, full: Scale = FULL, miniature: Scale = MINIATURE, *, images: int = 64, per_class: int = 5, rounds: int = 7
    ) -> None:
        """images: for predictions. per_class: images of the embedded classes for samplings. rounds: of the times."""
        self._scales = {False: full, True: miniature}
        self._images, self._per_class, self._rounds = images, per_class, rounds

    def needs(self, miniature: bool) -> Sequence[Need]:
        return (data_need(FASHION),) if miniature else (pipeline_need(),)

    def cells(self, settings: Settings) -> Sequence[Cell]:
        scale = self._scales[settings.miniature]
        needs = (FASHION,) if settings.miniature else (PIPELINE,)
        cost = len(self._requests(settings)) * image_cost(settings, scale)
        once = self._images * len(LEVELS) * EMBEDDED_CALL
        found = [
            Cell({"part": PREDICTION, "method": method, "keep_rate": rate}, needs, once)
            for method, rate in (ways_of(compared_cells(scale.keep_rates)) if settings.miniature else ())
        ]
        found += [
            Cell({"part": SAMPLING, "method": method, "keep_rate": rate}, needs, cost)
            for method, rate in sampled_ways(scale.keep_rates)
        ]
        if settings.miniature:
            calls = _BATCH * self._rounds * len({**paper_ways(scale), **own_ways(scale)})
            found.append(Cell({"part": TIME, "method": None, "keep_rate": None}, needs, calls * EMBEDDED_CALL))
        return found

    def _requests(self, settings: Settings) -> list[Request]:
        if settings.miniature:
            return fashion_requests(self._per_class, seed=APART * 99)
        return imagenet_requests(1, seed=APART * 99, classes=_CLASSES)

    def open(self, settings: Settings) -> RunCell:
        scale = self._scales[settings.miniature]
        generator = cache(lambda: open_generator(settings, scale))
        ways, requests = sampled_ways(scale.keep_rates), self._requests(settings)
        size = settings.batch_size or (len(requests) if settings.miniature else scale.batch_size)
        dense = cache(lambda: sampled(generator(), Way(DENSE), requests, size))
        calls = cache(lambda: predictions(generator(), settings.data[FASHION], self._images))

        def run(cell: Cell) -> dict[str, Any]:
            part, about = cell.about["part"], about_generator(generator())
            if part == TIME:
                shown = {**paper_ways(scale), **own_ways(scale)}
                rows = times(generator(), shown, _BATCH, self._rounds)
                return {"batch": _BATCH, "rounds": self._rounds, "rows": rows, **about}
            way = ways[cell.about["method"], cell.about["keep_rate"]]
            if part == PREDICTION:
                [by_level] = prediction_errors(generator().reduced, [way], calls()).values()
                found = {"error": float(np.mean(by_level)), "by_level": by_level, "images": self._images}
                return {**found, "levels": LEVELS, **about}
            errors = relative_errors(sampled(generator(), way, requests, size), dense())
            return {"error": float(errors.mean()), "images": len(requests), **about}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        found = []
        for (part,), here in grouped(results, "part").items():
            if part == TIME:
                found.append(_times(here[0]))
            else:
                found.append(_errors(str(part), here))
        return found


def sampled_ways(keep_rates: Sequence[float]) -> Ways:
    """All that single predictions are compared with, and groups that are kept from step to step."""
    kept: dict[str, dict[str, Any]] = {
        "atc-average, kept for 5 steps": {"every": 5},
        "atc-average, kept until features moved by 0.3": {"drift": 0.3},
        "atc-average, shared by the blocks, kept for 5 steps": {"every": 5, "share": "resolution"},
    }
    more = [cell for name, how in kept.items() for cell in renamed(name, cells_of(["atc"], keep_rates, common=how))]
    return ways_of([*compared_cells(keep_rates), *more])


def predictions(generator: Generator, data: Path, n_images: int) -> list[Callable[[], Tensor]]:
    """Calls of the embedded model on noised test images, one for each level."""
    images, labels = read_split(data, "val")
    clean = embedded.to_model(torch.from_numpy(images[:n_images].copy())[:, None])
    classes = torch.from_numpy(labels[:n_images].copy()).long()
    return [_prediction(generator, clean, classes, level) for level in LEVELS]


def _prediction(generator: Generator, clean: Tensor, classes: Tensor, level: int) -> Callable[[], Tensor]:
    from diffusers import DDPMScheduler

    steps = torch.full((len(clean),), level)
    noise = torch.randn(clean.shape, generator=random_generator("mini-synthesis", level))
    noisy = DDPMScheduler(**embedded.NOISE).add_noise(clean, noise, steps)
    return lambda: generator.reduced(noisy, steps, classes).sample


def sampled(generator: Generator, way: Way, requests: Sequence[Request], batch_size: int) -> Tensor:
    """The pictures that whole samplings end with, (images, H, W) or (images, H, W, 3)."""
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
def times(generator: Generator, ways: Ways, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds per image of one call of the embedded model, in turns: the median, and each in proportion to the
    dense call of the same round."""
    noisy = embedded.starting_noise(range(batch))
    steps, classes = torch.full((batch,), 500), torch.arange(batch) % embedded.N_CLASSES
    seconds: dict[Any, list[float]] = {place: [] for place in ways}
    with progress((rounds + 1) * len(ways), "times", every_seconds=10) as tell:
        for number in range(rounds + 1):  # the first one warms up
            for place, way in ways.items():
                way.apply(generator.reduced)
                began = time.perf_counter()
                generator.reduced(noisy, steps, classes)
                if number:
                    seconds[place].append(time.perf_counter() - began)
                tell(way.name)
    dense = next(iter(seconds.values()))
    return [
        {
            "method": method,
            "keep_rate": rate,
            "ms_per_image": 1000 * median(taken) / batch,
            "of_dense": median(one / other for one, other in zip(taken, dense, strict=True)),
        }
        for (method, rate), taken in seconds.items()
    ]


def _errors(part: str, results: Sequence[Result]) -> Section:
    first = results[0]
    if part == PREDICTION:
        steps = ", ".join(map(str, first["levels"]))
        title = "Relative error of a prediction against the dense one (%)"
        text = f"{first['images']} test images, mean over steps {steps} of 1000."
    else:
        title = "Relative error of the picture after all steps against the dense one's (%)"
        text = f"{first['images']} pictures."
    return Section(title, by_rate(results, lambda result: f"{100 * result['error']:.1f}"), text)


def _times(result: Result) -> Section:
    dense, *others = result["rows"]
    text = f"In turns; dense {dense['ms_per_image']:.1f} ms per image, of {result['batch']} at a time."
    title = "Time of one call of the model in proportion to the dense one's"
    return Section(title, by_rate(others, lambda row: f"{row['of_dense']:.2f}"), text)


def by_rate(results: Sequence[Result], told: Callable[[Result], str]) -> Any:
    """One line per method, one column per keep rate."""
    places = {(result["method"], result["keep_rate"]): told(result) for result in results}
    rates = sorted({rate for _, rate in places}, reverse=True)
    methods = list(dict.fromkeys(str(method) for method, _ in places))
    return beside("method", methods, rates, lambda row, rate: places.get((row, rate)), lambda row, rate: None, percent)


ITEMS = (DiffusionOptions(),)
