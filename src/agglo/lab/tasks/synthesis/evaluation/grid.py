"""Images of all requests by all cells, in folders: a run that was killed continues with the next image.

A batch holds the same requests however often a run is stopped and however many processes share it, and torch's
generator starts anew for each: so do methods that draw (tomesd's destinations). All that an image depends on is in
the record of the folder, and another run in the same folder is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    from accelerate import Accelerator, PartialState
    from PIL.Image import Image

_SECONDS = "seconds"


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
    is_main = processes is None or processes.is_main_process
    described = [[request.name, request.prompt, request.seed] for request in requests]
    header = {"settings": {**generator.about(), "batch_size": batch_size, "requests": described}}
    same: Any = {"same": ("settings",), "subject": ("name",), "sources": ("config",)}
    journal = Journal(output / "record.json", header, writes=is_main, **same)
    for cell in cells:  # an impossible one raises before hours of work on the others
        cell.apply(generator.reduced)
    _wait(processes)  # all have read the record before the first one writes it
    if is_main:
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output)
    keys = [{"name": cell.name, "config": None if cell.config is None else cell.config.to_dict()} for cell in cells]
    for key in keys:
        journal.once(key, dict)
    _wait(processes)
    try:
        for cell, key in zip(cells, keys, strict=True):
            _generate_cell(generator, cell, requests, output / cell.name, batch_size, processes)
            _wait(processes)
            if is_main:
                journal.add(key, _summary(output / cell.name, requests))
    finally:
        patch.remove(generator.reduced)
    return {result["name"]: result for result in journal.results}


def _wait(processes: Accelerator | PartialState | None) -> None:
    if processes is not None:
        processes.wait_for_everyone()


def _generate_cell(
    generator: Generator,
    cell: GenerationCell,
    requests: Sequence[Request],
    folder: Path,
    batch_size: int,
    processes: Accelerator | PartialState | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index, count = (0, 1) if processes is None else (processes.process_index, processes.num_processes)
    mine = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)][index::count]
    missing = [batch for batch in mine if any(not file_of(folder, request).exists() for request in batch)]
    if not missing:
        return
    cell.apply(generator.reduced)
    device, done = torch.device("cuda" if torch.cuda.is_available() else "cpu"), len(mine) - len(missing)
    with progress(len(mine), cell.name, start=done, every_seconds=10, quiet=index > 0) as tell:
        for batch in missing:
            seed_everything("generate", [request.seed for request in batch])
            with stopwatch(device) as taken:
                images = generator(batch)
            each = taken.seconds / len(batch)
            for request, image in zip(batch, images, strict=True):
                if not (path := file_of(folder, request)).exists():
                    _save(image, path, {"prompt": request.prompt, "seed": request.seed, _SECONDS: f"{each:.6g}"})
            tell(f"{each:.3g} s per image")


def file_of(folder: Path, request: Request) -> Path:
    return folder / f"{request.name}.png"


def _save(image: Image, path: Path, about: dict[str, Any]) -> None:
    """Write a PNG with texts about it in one step."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for name, value in about.items():
        info.add_itxt(name, str(value))
    with replacing(path) as unfinished:
        image.save(unfinished, format="PNG", pnginfo=info)


def _summary(folder: Path, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the number of images of a cell, and mean, deviation and median of their times in seconds."""
    from PIL import Image

    seconds = []
    for request in requests:
        with Image.open(file_of(folder, request)) as image:
            image.load()
            seconds.append(float(image.info[_SECONDS]))
    times = {"seconds_mean": mean(seconds), "seconds_std": pstdev(seconds), "seconds_median": median(seconds)}
    return {"images": len(seconds), **times}
