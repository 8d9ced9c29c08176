"""Pictures of all requests by all cells of a grid, in folders: a run that was killed goes on with the next picture.

A batch holds the same requests however often a run is stopped and however many processes share it, and torch's
generator starts anew for each: so do methods that draw (tomesd's destinations). All that a picture depends on is in
the record of the folder, and another run in the same folder is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, Any

import torch

from agglo import patching
from agglo.experiments.files import remove_unfinished, replacing, write_json
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress
from agglo.experiments.randomness import seed_everything
from agglo.synthesis.data.requests import Request
from agglo.synthesis.evaluation.cells import Cell
from agglo.synthesis.evaluation.generators import Generator

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
        """Until all are here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


def generate(
    generator: Generator,
    cells: Sequence[Cell],
    requests: Sequence[Request],
    output: Path,
    *,
    batch_size: int = 1,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Write output/<cell>/<request>.png for all of them; what is there already stays.

    Returns the record, which output/record.json holds too: settings, and per cell the time of an image in seconds.
    """
    workers = workers or Workers()
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    settings = {**generator.about(), "batch_size": batch_size, "requests": _told(requests)}
    record = _continued(output / _RECORD, settings, cells)
    for cell in cells:  # an impossible one raises before hours of work on the others
        cell.apply(generator.reduced)
    workers.wait()
    if workers.index == 0:
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output)
        write_json(output / _RECORD, record)
    workers.wait()
    try:
        for cell in cells:
            _generate_cell(generator, cell, requests, output / cell.name, batch_size, workers)
            workers.wait()
            if workers.index == 0:
                record["cells"][cell.name] |= summary(output / cell.name, requests)
                write_json(output / _RECORD, record)
    finally:
        patching.remove(generator.reduced)
    return record


def _told(requests: Sequence[Request]) -> list[list[Any]]:
    return [[request.name, request.prompt, request.seed] for request in requests]


def _continued(path: Path, settings: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The record of a folder with these cells added to it; ValueError if it is of other settings."""
    wanted = {cell.name: {"options": dict(cell.options)} for cell in cells}
    if not path.exists():
        return {"settings": dict(settings), "machine": machine(), "cells": wanted}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        then, there = before["settings"], before["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no record of generated images; give another folder") from error
    now = json.loads(json.dumps(dict(settings)))
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            change = "" if name == "requests" else f" ({then.get(name)!r} then, {now.get(name)!r} now)"
            raise ValueError(f"output={str(path.parent)!r} holds images of other {name}{change}; give another folder")
    for name, entry in wanted.items():
        options = json.loads(json.dumps(entry["options"]))
        if name in there and there[name]["options"] != options:
            raise ValueError(
                f"output={str(path.parent)!r} holds {name} with options {there[name]['options']}, not {options}; "
                "give another folder"
            )
    return {**before, "cells": {**wanted, **there}}


def _generate_cell(
    generator: Generator, cell: Cell, requests: Sequence[Request], folder: Path, batch_size: int, workers: Workers
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
                    save_picture(image, file_of(folder, request), request, seconds / len(batch))
            tell(f"{seconds / len(batch):.3g} s per image")


def timed(generator: Generator, batch: Sequence[Request]) -> tuple[float, list[Image]]:
    """Seconds of a whole batch, and its pictures."""
    seed_everything("generate", [request.seed for request in batch])
    _settle()
    began = time.perf_counter()
    images = generator(batch)
    _settle()
    return time.perf_counter() - began, images


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def file_of(folder: Path, request: Request) -> Path:
    return folder / f"{request.name}.png"


def save_picture(image: Image, path: Path, request: Request, seconds: float) -> None:
    """A PNG that is whole or not there, with its prompt, its seed and the time it took."""
    from PIL.PngImagePlugin import PngInfo

    about = PngInfo()
    for name, value in {"prompt": request.prompt, "seed": request.seed, _SECONDS: f"{seconds:.6g}"}.items():
        about.add_itxt(name, str(value))
    with replacing(path) as unfinished:
        image.save(unfinished, format="PNG", pnginfo=about)


def summary(folder: Path, requests: Sequence[Request]) -> dict[str, Any]:
    """Number of images of a cell, and mean, deviation and median of their times in seconds."""
    from PIL import Image

    seconds = []
    for request in requests:
        with Image.open(file_of(folder, request)) as image:
            image.load()
            seconds.append(float(image.info[_SECONDS]))
    return {
        "images": len(seconds),
        "seconds_mean": mean(seconds),
        "seconds_std": pstdev(seconds),
        "seconds_median": median(seconds),
    }
