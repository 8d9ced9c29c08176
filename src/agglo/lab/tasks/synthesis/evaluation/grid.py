"""Images of all requests by all reductions, in folders and side by side; a killed run continues with the next image.

A batch holds the same requests however often a run is stopped and however many processes share it, and torch's
generator starts anew for each: so do methods that draw (tomesd's destinations). All that an image depends on is in
the record of the folder, and another run in the same folder is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, pstdev
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image as pil
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from agglo import patch
from agglo.config import ReductionConfig
from agglo.drawing.groups import Pixels
from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.generators import Generator
from agglo.text import parse_call
from agglo.utils.files import remove_unfinished, replacing
from agglo.utils.journal import Journal
from agglo.utils.machine import machine
from agglo.utils.progress import progress
from agglo.utils.randomness import seed_everything
from agglo.utils.timing import stopwatch

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

DENSE = "dense"
_LARGEST, _SMALLEST = 256, 96  # sides of a panel in pixels
_LONGEST_TITLE = 60  # characters


class GenerationCell(NamedTuple):
    """One reduction of a diffusion model and the name of its folder; the config is None for the dense model."""

    name: str
    config: ReductionConfig | None = None

    def apply(self, model: Any) -> None:
        """Reduce a pipeline or model this way, in place of any other."""
        if self.config is None:
            patch.remove(model)
        else:
            patch.apply(model, self.config)


def cells_of(methods: Sequence[str], keep_rates: Sequence[float]) -> list[GenerationCell]:
    """Return every method, with its options, at every keep rate, repeated ones once; "dense" comes first.

    >>> [cell.name for cell in cells_of(["dense", "atc:linkage=single,every=2"], [0.5])]
    ['dense', 'atc-linkage=single-every=2_keep0.5']
    """
    cells = [GenerationCell(DENSE)] if DENSE in methods else []
    for rate in dict.fromkeys(keep_rates):
        for text in dict.fromkeys(methods):
            name, values, options = parse_call(text)
            if values:
                raise ValueError(f"method={text!r}: write name:key=value")
            if text != DENSE:
                config = ReductionConfig.of(name, keep_rate=rate, **options)
                cells.append(GenerationCell(f"{re.sub('[^a-zA-Z0-9_.=]+', '-', text)}_keep{rate:g}", config))
    return cells


def relative_errors(reduced: Tensor, dense: Tensor) -> Tensor:
    """Return the relative L2 error of each image, (B,)."""
    difference = (reduced.float() - dense.float()).flatten(1).norm(dim=1)
    return difference / dense.float().flatten(1).norm(dim=1)


def generate(
    generator: Generator,
    cells: Sequence[GenerationCell],
    requests: Sequence[Request],
    output: Path,
    *,
    batch_size: int = 1,
    processes: Accelerator | PartialState | None = None,
) -> dict[str, dict[str, Any]]:
    """Write output/<cell>/<request>.png for all of them; what is there already stays.

    Return per cell its options and the time of an image in seconds, which output/record.json holds too. `processes` are
    those that share the work, where there are several.

    Raises:
        ValueError: A cell cannot be applied, or the folder holds images of other settings.
    """
    number, count = (0, 1) if processes is None else (processes.process_index, processes.num_processes)
    described = [[request.name, request.prompt, request.seed] for request in requests]
    header = {"settings": {**generator.about, "batch_size": batch_size, "requests": described}, "machine": machine()}
    same: Any = {"same": ("settings",), "subject": ("name",), "sources": ("config",)}
    journal = Journal(output / "record.json", header, writes=number == 0, **same)
    for cell in cells:  # an impossible one raises before hours of work on the others
        cell.apply(generator.reduced)
    _wait(processes)  # all have read the record before the first one writes it
    if number == 0:
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output)
    keys = [{"name": cell.name, "config": None if cell.config is None else cell.config.to_dict()} for cell in cells]
    for key in keys:
        journal.once(key, dict)
    _wait(processes)
    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)][number::count]
    try:
        for cell, key in zip(cells, keys, strict=True):
            _generate_cell(generator, cell, batches, output / cell.name, quiet=number > 0)
            _wait(processes)
            if number == 0:
                journal.add(key, _summary(output / cell.name, requests))
    finally:
        patch.remove(generator.reduced)
    return {result["name"]: result for result in journal.results}


def _wait(processes: Accelerator | PartialState | None) -> None:
    if processes is not None:
        processes.wait_for_everyone()


def _generate_cell(
    generator: Generator, cell: GenerationCell, batches: Sequence[Sequence[Request]], folder: Path, *, quiet: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    missing = [batch for batch in batches if not all(file_of(folder, request).exists() for request in batch)]
    if not missing:
        return
    cell.apply(generator.reduced)
    device, done = torch.device("cuda" if torch.cuda.is_available() else "cpu"), len(batches) - len(missing)
    with progress(len(batches), cell.name, start=done, every_seconds=10, quiet=quiet) as tell:
        for batch in missing:
            seed_everything("generate", [request.seed for request in batch])
            with stopwatch(device) as taken:
                images = generator(batch)
            each = taken.seconds / len(batch)
            for request, image in zip(batch, images, strict=True):
                if not (path := file_of(folder, request)).exists():
                    _save(image, path, request, each)
            tell(f"{each:.3g} s per image")


def file_of(folder: Path, request: Request) -> Path:
    return folder / f"{request.name}.png"


def _save(image: Image, path: Path, request: Request, seconds: float) -> None:
    """Write a PNG in one step, with its prompt, its seed and the seconds it took."""
    info = PngInfo()
    for name, value in {"prompt": request.prompt, "seed": request.seed, "seconds": f"{seconds:.6g}"}.items():
        info.add_itxt(name, str(value))
    with replacing(path) as unfinished:
        image.save(unfinished, format="PNG", pnginfo=info)


def _summary(folder: Path, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the number of images of a cell, and mean, deviation and median of their times in seconds."""
    seconds = []
    for request in requests:
        with pil.open(file_of(folder, request)) as image:
            image.load()
            seconds.append(float(image.info["seconds"]))
    times = {"seconds_mean": mean(seconds), "seconds_std": pstdev(seconds), "seconds_median": median(seconds)}
    return {"images": len(seconds), **times}


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
