"""The paper's sample grids: the same seeds dense and with fewer tokens, one picture after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.paper import synthesis
from agglo.lab.paper.compare import DENSE, by_rate, percent
from agglo.lab.paper.study import Result, RunCell, Section, Settings, Study, StudyCell
from agglo.lab.paper.synthesis import FULL, MINIATURE, GeneratorScale, Reductions
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.errors import relative_errors
from agglo.lab.tasks.synthesis.evaluation.features import opened
from agglo.lab.tasks.synthesis.evaluation.grid import file_of, generate
from agglo.lab.tasks.synthesis.evaluation.sheets import panel_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

# Class and image: a magpie, a trash can, a sarong and an eggnog; in miniature a T-shirt, trousers, a bag and a boot.
SHOWN = ("18_1", "412_1", "775_1", "969_0")
MINIATURE_SHOWN = ("0_0", "1_0", "8_0", "9_0")
_MAIN_RATES = (0.8, 0.6, 0.4)  # of the figure in the paper itself, which shows the first picture


def shown(scale: GeneratorScale) -> list[Request]:
    """Return what is drawn, with the paper's seeds."""
    wanted = MINIATURE_SHOWN if scale.embedded else SHOWN
    classes = [int(name.partition("_")[0]) for name in wanted]
    return [request for request in scale.requests(0, classes) if request.name in wanted]


def _axes(scale: GeneratorScale, settings: Settings) -> Iterator[StudyCell]:
    for method, rate in scale.reductions:
        yield StudyCell({"method": method, "keep_rate": rate}, scale.generator_needs)


def _run(scale: GeneratorScale, settings: Settings) -> RunCell:
    generator = cache(lambda: synthesis.open_generator(settings, scale))
    workers, requests = synthesis.workers_of(settings), shown(scale)
    folder = settings.run_folder("diffusion-samples")

    def pixels(name: str) -> torch.Tensor:
        """Read the pictures (B, H, W, C) of a reduction."""
        images = opened(file_of(folder / name, request) for request in requests)
        return torch.from_numpy(np.stack([np.asarray(image) for image in images]))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cells = scale.reductions
        cell = cells[about["method"], about["keep_rate"]]
        # Dense pictures are there already, unless the folder was emptied after they had been noted.
        generate(generator(), [cells[DENSE, None], cell], requests, folder, workers=workers)
        apart = relative_errors(pixels(cell.name), pixels(DENSE)).tolist()
        by_picture = dict(zip([request.name for request in requests], apart, strict=True))
        return {"error": mean(apart), "by_picture": by_picture, **synthesis.sources(generator(), cell)}

    return run


def _table(results: Sequence[Result], scale: GeneratorScale) -> list[Section]:
    text = (
        f"Relative error of the pixels against the dense picture of the same seed (%), mean over {len(SHOWN)} "
        "pictures. The paper prints pictures alone, no numbers."
    )
    table = by_rate(results, lambda result: 100 * result["error"], ".1f")
    return [Section("How far the pictures are from the dense ones", table, text)] if table.rows else []


def _draw(results: Sequence[Result], scale: GeneratorScale, settings: Settings, folder: Path) -> list[Path]:
    """Draw the pictures in the folder of runs; where they are gone, the sheets stay as they were drawn."""
    images, requests = settings.run_folder("diffusion-samples"), shown(scale)
    done = {(result["method"], result["keep_rate"]) for result in results}
    cells = {key: cell for key, cell in scale.reductions.items() if key in done}
    if (DENSE, None) not in cells or len(cells) == 1:
        return []
    names = ["samples.png", *(f"samples-{request.name}.png" for request in requests)]
    if all(file_of(images / cell.name, request).exists() for cell in cells.values() for request in requests):
        rates = [rate for rate in scale.keep_rates if any(rate == other for _, other in cells)]
        main = [rate for rate in rates if rate in _MAIN_RATES] or rates
        chosen = [main, *([rates] * len(requests))]
        for name, request, some in zip(names, [requests[0], *requests], chosen, strict=True):
            _sheet(images, cells, request, some).save(folder / name)
    return [folder / name for name in names]


def _sheet(images: Path, cells: Reductions, request: Request, rates: Sequence[float]) -> Image:
    """Compose one row per keep rate, the dense picture first in each; one column per method."""
    rows = []
    for rate in rates:
        keys = [key for key in cells if key[1] in (None, rate)]
        files = [file_of(images / cells[key].name, request) for key in keys]
        panels = [Panel(panel_pixels(image), name) for (name, _), image in zip(keys, opened(files), strict=True)]
        rows.append(Row(panels, f"{request.name}: {request.prompt}, {percent(rate)}"))
    return compose(rows)


DIFFUSION_SAMPLES = Study(
    name="diffusion-samples",
    shows="figures sdViz and four supplementary ones",
    about="Pictures of Stable Diffusion 1.5 with the paper's seeds (a magpie, a trash can, a sarong, an eggnog): "
    "dense, ToMe, the paper's ATC with three linkages, and last, not in the paper, agglo's own mode, at six keep rates",
    stands_in="The embedded generator's T-shirt, trousers, bag and boot stand in.",
    gpu_hours="0.2",
    full=FULL,
    miniature=replace(MINIATURE, keep_rates=FULL.keep_rates, per_class=2),
    axes=_axes,
    run=_run,
    table=_table,
    draw=_draw,
)
ITEMS = (DIFFUSION_SAMPLES,)
