"""Sheets: the same requests by several cells side by side, and the groups of a denoising step over the picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from agglo import patching
from agglo.drawing.groups import rows as group_rows
from agglo.drawing.sheet import Panel, Row, compose
from agglo.grouping import Grouping
from agglo.methods import Outcome
from agglo.synthesis.data.requests import Request
from agglo.synthesis.evaluation.cells import Cell
from agglo.synthesis.evaluation.generators import Generator
from agglo.synthesis.evaluation.grid import file_of, timed
from agglo.tracing import Step, Trace

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST, _SMALLEST = 256, 96  # sides of a panel in pixels
_LONGEST_TITLE = 60  # characters


def contact_sheet(output: Path, cells: Sequence[Cell], requests: Sequence[Request]) -> Image:
    """One row per request, one column per cell, from the files that `generate` wrote."""
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
    """(H, W, 3) of a size to look at: small pictures with their pixels repeated, large ones made smaller."""
    from PIL import Image as images

    image = image.convert("RGB")
    if max(image.size) > _LARGEST:
        image.thumbnail((_LARGEST, _LARGEST), images.Resampling.LANCZOS)
    times = max(1, -(-_SMALLEST // max(image.size)))
    return np.asarray(image).repeat(times, axis=0).repeat(times, axis=1)


def groups_sheet(generator: Generator, cell: Cell, requests: Sequence[Request], step: int) -> Image:
    """One row per request: the picture, then the groups of each self-attention at a denoising step, counted from 0.

    Generates them again, one at a time. Of a guided model the groups are those of the prompted half.
    """
    if not cell.options:
        raise ValueError(f"{cell.name} has no groups to draw")
    if not 0 <= step < generator.steps:
        raise ValueError(f"step {step} of {generator.steps} does not exist: 0 to {generator.steps - 1} are accepted")
    rows: list[Row] = []
    cell.apply(generator.reduced)
    try:
        for request in requests:
            with patching.trace(generator.reduced, passes=generator.steps) as trace:
                image = timed(generator, [request])[1][0]
            chosen = Trace([[_of_prompted(entry) for entry in trace.passes[step]]])
            pixels = torch.from_numpy(panel_pixels(generator.canvas(image)).copy()).permute(2, 0, 1)[None]
            rows += group_rows(chosen, pixels, names=[_title(request)], scale=1)
    finally:
        patching.remove(generator.reduced)
    return compose(rows)


def _of_prompted(step: Step) -> Step:
    """A step with the groups of the last picture of the batch alone."""
    whole = step.total
    last = Grouping(whole.labels[-1:], whole.sizes[-1:], whole.prefix)
    return Step(step.block, Outcome(last), last)
