"""Images of all requests by all cells of a grid, in folders: a run that was killed continues with the next image.

A batch holds the same requests however often a run is stopped and however many processes share it, and torch's
generator starts anew for each: so do methods that draw (tomesd's destinations). All that an image depends on is in
the record of the folder, and another run in the same folder is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, Any

import torch

from agglo import patch
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell
from agglo.lab.tasks.synthesis.evaluation.generators import Generator
from agglo.utils.files import remove_unfinished, replacing
from agglo.utils.journal import Journal
from agglo.utils.progress import progress
from agglo.utils.randomness import seed_everything
from agglo.utils.timing import stopwatch

if TYPE_CHECKING:
    from PIL.Image import Image

_SECONDS = "seconds"
_RECORD = "record.json"


@dataclass(frozen=True)
class Workers:
    """How many processes share the work, and which one this is."""

    count: int = 1
    index: int = 0

    def wait(self) -> None:
        """Barrier."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


def generate(
    generator: Generator,
    cells: Sequence[GenerationCell],
    requests: Sequence[Request],
    output: Path,
    *,
    batch_size: int = 1,
    workers: Workers | None = None,
) -> dict[str, dict[str, Any]]:
    """Write output/<cell>/<request>.png for all of them; what is there already stays.

    Returns:
        Per cell its options and the time of an image in seconds, which output/record.json holds too.

    Raises:
        ValueError: A cell cannot be applied, or the folder holds images of other settings.
    """
    workers = workers or Workers()
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    described = [[request.name, request.prompt, request.seed] for request in requests]
    settings = {**generator.about(), "batch_size": batch_size, "requests": described}
    header, writes = {"settings": settings}, workers.index == 0
    journal = Journal(
        output / _RECORD, header, same=("settings",), subject=("name",), sources=("config",), writes=writes
    )
    for cell in cells:  # an impossible one raises before hours of work on the others
        cell.apply(generator.reduced)
    workers.wait()
    if workers.index == 0:
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output)
    for cell in cells:
        journal.once(_key(cell), dict)
    workers.wait()
    try:
        for cell in cells:
            _generate_cell(generator, cell, requests, output / cell.name, batch_size, workers)
            workers.wait()
            if workers.index == 0:
                journal.add(_key(cell), summary(output / cell.name, requests))
    finally:
        patch.remove(generator.reduced)
    return {result["name"]: result for result in journal.results}


def _key(cell: GenerationCell) -> dict[str, Any]:
    return {"name": cell.name, "config": None if cell.config is None else cell.config.to_dict()}


def _generate_cell(
    generator: Generator,
    cell: GenerationCell,
    requests: Sequence[Request],
    folder: Path,
    batch_size: int,
    workers: Workers,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    mine = batches[workers.index :: workers.count]
    missing = [batch for batch in mine if any(not file_of(folder, request).exists() for request in batch)]
    if not missing:
        return
    cell.apply(generator.reduced)
    done = len(mine) - len(missing)
    with progress(len(mine), cell.name, start=done, every_seconds=10, quiet=workers.index > 0) as tell:
        for batch in missing:
            seconds, images = timed(generator, batch)
            for request, image in zip(batch, images, strict=True):
                if not file_of(folder, request).exists():
                    save_image(image, file_of(folder, request), request, seconds / len(batch))
            tell(f"{seconds / len(batch):.3g} s per image")


def timed(generator: Generator, batch: Sequence[Request]) -> tuple[float, list[Image]]:
    """Return the seconds of a whole batch, and its images."""
    seed_everything("generate", [request.seed for request in batch])
    with stopwatch(torch.device("cuda" if torch.cuda.is_available() else "cpu")) as taken:
        images = generator(batch)
    return taken.seconds, images


def file_of(folder: Path, request: Request) -> Path:
    return folder / f"{request.name}.png"


def save_image(image: Image, path: Path, request: Request, seconds: float) -> None:
    """Write a PNG in one step, with its prompt, its seed and the time it took."""
    from PIL.PngImagePlugin import PngInfo

    about = PngInfo()
    for name, value in {"prompt": request.prompt, "seed": request.seed, _SECONDS: f"{seconds:.6g}"}.items():
        about.add_itxt(name, str(value))
    with replacing(path) as unfinished:
        image.save(unfinished, format="PNG", pnginfo=about)


def summary(folder: Path, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the number of images of a cell, and mean, deviation and median of their times in seconds."""
    from PIL import Image

    seconds = []
    for request in requests:
        with Image.open(file_of(folder, request)) as image:
            image.load()
            seconds.append(float(image.info[_SECONDS]))
    times = {"seconds_mean": mean(seconds), "seconds_std": pstdev(seconds), "seconds_median": median(seconds)}
    return {"images": len(seconds), **times}
