"""Sheets: the same requests by several cells side by side, and the groups of a denoising step over the image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from agglo import patch
from agglo.drawing.groups import rows as group_rows
from agglo.drawing.sheet import Panel, Row, compose
from agglo.grouping import Grouping
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell
from agglo.lab.tasks.synthesis.evaluation.generators import Generator
from agglo.lab.tasks.synthesis.evaluation.grid import file_of, timed
from agglo.methods import Outcome
from agglo.tracing import Step, Trace

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST, _SMALLEST = 256, 96  # sides of a panel in pixels
_LONGEST_TITLE = 60  # characters


def contact_sheet(output: Path, cells: Sequence[GenerationCell], requests: Sequence[Request]) -> Image:
    """Draw one row per request and one column per cell, from the files that `generate` wrote."""
    from PIL import Image as images

    rows = []
    for request in requests:
        panels = []
        for cell in cells:
            with images.open(file_of(output / cell.name, request)) as image:
                panels.append(Panel(panel_pixels(image), cell.name.replace("_", " ")))
        rows.append(Row(panels, _title(request)))
    return compose(rows)


def _title(request: Request) -> str:
    return shorten(f"{request.name}: {request.prompt}", _LONGEST_TITLE, placeholder=" ...")


def panel_pixels(image: Image) -> NDArray[np.uint8]:
    """Return pixels (H, W, 3) of a size to look at: small images with repeated pixels, large ones made smaller."""
    from PIL import Image as images

    image = image.convert("RGB")
    if max(image.size) > _LARGEST:
        image.thumbnail((_LARGEST, _LARGEST), images.Resampling.LANCZOS)
    times = max(1, -(-_SMALLEST // max(image.size)))
    return np.asarray(image).repeat(times, axis=0).repeat(times, axis=1)


def groups_sheet(generator: Generator, cell: GenerationCell, requests: Sequence[Request], step: int) -> Image:
    """Draw one row per request: the image, then the groups of each self-attention at a denoising step, from 0.

    The images are generated again, one at a time. For a guided model the groups are those of the prompted half.
    """
    if cell.config is None:
        raise ValueError(f"{cell.name} has no groups to draw")
    if not 0 <= step < generator.steps:
        raise ValueError(f"step {step} of {generator.steps} does not exist: 0 to {generator.steps - 1} are accepted")
    rows: list[Row] = []
    cell.apply(generator.reduced)
    try:
        for request in requests:
            with patch.trace(generator.reduced, passes=generator.steps) as trace:
                image = timed(generator, [request])[1][0]
            chosen = Trace([[_of_prompted(entry) for entry in trace.passes[step]]])
            pixels = torch.from_numpy(panel_pixels(generator.canvas(image)).copy()).permute(2, 0, 1)[None]
            rows += group_rows(chosen, pixels, names=[_title(request)], scale=1)
    finally:
        patch.remove(generator.reduced)
    return compose(rows)


def _of_prompted(step: Step) -> Step:
    """Return a step with the groups of the last image of the batch alone."""
    whole = step.total
    last = Grouping(whole.labels[-1:], whole.sizes[-1:], whole.prefix)
    return Step(step.block, Outcome(last), last)
