"""Sheets: the same requests by several cells side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np
from PIL import Image as pil
from PIL.Image import Image

from agglo.drawing.groups import Pixels
from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell
from agglo.lab.tasks.synthesis.evaluation.grid import file_of

_LARGEST, _SMALLEST = 256, 96  # sides of a panel in pixels
_LONGEST_TITLE = 60  # characters


def contact_sheet(output: Path, cells: Sequence[GenerationCell], requests: Sequence[Request]) -> Image:
    """Draw one row per request and one column per cell, from the files that `generate` wrote."""
    rows = []
    for request in requests:
        panels = []
        for cell in cells:
            with pil.open(file_of(output / cell.name, request)) as image:
                panels.append(Panel(panel_pixels(image), cell.name.replace("_", " ")))
        rows.append(Row(panels, shorten(f"{request.name}: {request.prompt}", _LONGEST_TITLE, placeholder=" ...")))
    return compose(rows)


def panel_pixels(image: Image) -> Pixels:
    """Return pixels (H, W, 3) of a size to look at: small images with repeated pixels, large ones made smaller."""
    image = image.convert("RGB")
    if max(image.size) > _LARGEST:
        image.thumbnail((_LARGEST, _LARGEST), pil.Resampling.LANCZOS)
    times = max(1, -(-_SMALLEST // max(image.size)))
    return np.asarray(image).repeat(times, axis=0).repeat(times, axis=1)
