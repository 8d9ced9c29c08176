"""The paper's sample grids: the same seeds dense and with fewer tokens, one picture after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from agglo.drawing.sheet import Panel, Row, compose
from agglo.reproduce.compare import Value, beside, grouped, percent
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.synthesis import (
    FULL,
    MINIATURE,
    PIPELINE,
    Scale,
    Ways,
    about_generator,
    image_cost,
    open_generator,
    own_ways,
    paper_ways,
    pipeline_need,
    workers_of,
)
from agglo.synthesis.data.requests import Request, fashion_requests, imagenet_requests
from agglo.synthesis.evaluation.cells import DENSE
from agglo.synthesis.evaluation.errors import relative_errors
from agglo.synthesis.evaluation.features import opened
from agglo.synthesis.evaluation.grid import file_of, generate
from agglo.synthesis.evaluation.sheets import panel_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

RATES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# Class and image: a magpie, a trash can, a sarong and an eggnog; in miniature a T-shirt, trousers, a bag and a boot.
SHOWN = ("18_1", "412_1", "775_1", "969_0")
MINIATURE_SHOWN = ("0_0", "1_0", "8_0", "9_0")
_MAIN_RATES = (0.8, 0.6, 0.4)  # of the figure in the paper itself, which shows the first picture


class DiffusionSamples(Item):
    name = "diffusion-samples"
    shows = "figures sdViz and four supplementary ones"
    about = (
        "Pictures of Stable Diffusion 1.5 with the paper's seeds (a magpie, a trash can, a sarong, an eggnog): dense, "
        "ToMe, the paper's ATC with three linkages, and last, not in the paper, agglo's own mode, at six keep rates"
    )
    miniature_about = "The embedded generator's T-shirt, trousers, bag and boot stand in."

    def __init__(self, full: Scale = FULL, miniature: Scale = MINIATURE, rates: tuple[float, ...] = RATES) -> None:
        self._scales, self._rates = {False: full, True: miniature}, rates

    def needs(self, miniature: bool) -> Sequence[Need]:
        return () if miniature else (pipeline_need(),)

    def _ways(self, settings: Settings) -> Ways:
        scale = self._scales[settings.miniature]
        return {**paper_ways(scale, self._rates), **own_ways(scale, self._rates)}

    def cells(self, settings: Settings) -> Sequence[Cell]:
        cost = len(SHOWN) * image_cost(settings, self._scales[settings.miniature])
        needs = () if settings.miniature else (PIPELINE,)
        return [Cell({"method": method, "keep_rate": rate}, needs, cost) for method, rate in self._ways(settings)]

    def open(self, settings: Settings) -> RunCell:
        scale = self._scales[settings.miniature]
        generator = cache(lambda: open_generator(settings, scale))
        ways, workers, requests = self._ways(settings), workers_of(settings), shown(settings)
        folder = settings.run_folder(self.name)

        def run(cell: Cell) -> dict[str, Any]:
            way = ways[cell.about["method"], cell.about["keep_rate"]]
            # Dense pictures are there already, unless the folder was emptied after they had been noted.
            generate(generator(), [ways[DENSE, None], way], requests, folder, workers=workers)
            found, dense = (_pixels(folder / name, requests) for name in (way.name, DENSE))
            apart = relative_errors(found, dense).tolist()
            error = {"error": mean(apart), "by_picture": dict(zip(_names(requests), apart, strict=True))}
            return {**error, "options": dict(way.options), **about_generator(generator())}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        by_place: dict[Any, list[Result]] = dict(grouped(results, "method", "keep_rate"))
        rates = sorted({rate for _, rate in by_place} - {None}, reverse=True)
        methods = [str(method) for method in dict.fromkeys(method for method, _ in by_place) if method != DENSE]
        if not methods:
            return []

        def measured(row: str, rate: float) -> Value | str | None:
            found = by_place.get((row, rate))
            return None if not found else f"{100 * found[0]['error']:.1f}"

        table = beside("method", methods, rates, measured, lambda row, rate: None, percent)
        text = (
            f"Relative error of the pixels against the dense picture of the same seed (%), mean over "
            f"{len(SHOWN)} pictures. The paper prints pictures alone, no numbers."
        )
        return [Section("How far the pictures are from the dense ones", table, text)]

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        """From the pictures in the folder of runs; where they are gone, the sheets stay as they were drawn."""
        images, requests = settings.run_folder(self.name), shown(settings)
        done = {(result["method"], result["keep_rate"]) for result in results}
        ways = {place: cell for place, cell in self._ways(settings).items() if place in done}
        names = ["samples.png", *(f"samples-{name}.png" for name in _names(requests))]
        if (DENSE, None) in ways and all(
            file_of(images / cell.name, request).exists() for cell in ways.values() for request in requests
        ):
            rates = [rate for rate in self._rates if any(rate == other for _, other in ways)]
            main = [rate for rate in rates if rate in _MAIN_RATES] or rates
            for name, request, chosen in zip(names, [requests[0], *requests], [main] + [rates] * 4, strict=True):
                _sheet(images, ways, request, chosen).save(folder / name)
        return [folder / name for name in names] if (DENSE, None) in ways and len(ways) > 1 else []


def shown(settings: Settings) -> list[Request]:
    """What is drawn, with the paper's seeds."""
    wanted = MINIATURE_SHOWN if settings.miniature else SHOWN
    make = fashion_requests if settings.miniature else imagenet_requests
    classes = [int(name.partition("_")[0]) for name in wanted]
    return [request for request in make(2, classes=classes) if request.name in wanted]


def _names(requests: Sequence[Request]) -> list[str]:
    return [request.name for request in requests]


def _pixels(folder: Path, requests: Sequence[Request]) -> torch.Tensor:
    """(pictures, H, W, C)."""
    import numpy as np

    images = [np.asarray(image) for image in opened(file_of(folder, request) for request in requests)]
    return torch.from_numpy(np.stack(images))


def _sheet(images: Path, ways: Ways, request: Request, rates: Sequence[float]) -> Image:
    """One row per keep rate, the dense picture first in each; one column per method."""
    methods = [method for method in dict.fromkeys(method for method, _ in ways) if method != DENSE]
    rows = []
    for rate in rates:
        places = [(DENSE, None), *((method, rate) for method in methods if (method, rate) in ways)]
        files = [file_of(images / ways[place].name, request) for place in places]
        panels = [
            Panel(panel_pixels(image), str(method)) for (method, _), image in zip(places, opened(files), strict=True)
        ]
        rows.append(Row(panels, f"{request.name}: {request.prompt}, {percent(rate)}"))
    return compose(rows)


ITEMS = (DiffusionSamples(),)
