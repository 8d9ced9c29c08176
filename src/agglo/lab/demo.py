"""The demo: what token reduction does to the embedded classifier, as a table, a plot and images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from agglo.clustering import cut, linkage
from agglo.config import ReductionConfig
from agglo.drawing.groups import Pixels, draw_groups, first_members
from agglo.drawing.sheet import Panel, Row, compose
from agglo.embedded.classifier import IMAGES, PHOTO
from agglo.lab.data.image_files import open_image
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.evaluation.grid import Reducible
from agglo.lab.evaluation.report import plot, sampling_error
from agglo.lab.options import EMBEDDED
from agglo.lab.tasks.classification.data import open_split
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation.figures import draw_configs
from agglo.lab.tasks.classification.evaluation.grid import METRICS, EvaluationSettings, run
from agglo.models.opening import build
from agglo.utils.files import write_json
from agglo.utils.machine import load_warning
from agglo.utils.tables import CANNOT, Column, Table
from agglo.utils.timing import speeds_in_turns

KEEP_RATES = (0.9, 0.7, 0.5, 0.25)
LINKAGES = ("single", "average", "complete")
_SCALE = 10  # of the images, which are 28 pixels wide
_TIMED_BATCH, _TURNS = 64, 5
_GROUPS = (400, 100, 25)  # of the photo
_LONG_SIDE, _PATCH = 448, 8  # pixels of the photo that are looked at, and of its patches
_CLASSES = (0, 1, 5, 7, 8, 9)  # top, trouser, sandal, sneaker, bag, boot: what is told apart at a glance


def show(output: Path, *, images: int | None = None) -> dict[str, Any]:
    """Evaluate the embedded classifier dense, with ToMe and with ATC, and return the report.

    accuracy.png, groups.png and results.json in the output folder take the place of an earlier demo's.
    """
    output.mkdir(parents=True, exist_ok=True)
    configs = configs_of(("tome", "atc"), keep_rates=KEEP_RATES, linkages=LINKAGES)
    report = run(EvaluationSettings(EMBEDDED, IMAGES, configs, images=images))
    model = build(EMBEDDED)
    wanted = inputs_for(model, "fashion-mnist")
    split = open_split("fashion-mnist", IMAGES, "val", transform=evaluation_transform(wanted, normalise=False))
    count = min(_TIMED_BATCH, report["data"]["images"])
    seen = torch.stack([torch.as_tensor(split[len(split) * index // count][0]) for index in range(count)])
    inputs = wanted.normalise(seen)
    # Speeds of the cells were measured one after the other; those that can be compared are measured in turns.
    done = [result for result in report["results"] if "cannot" not in result]
    timed = [None if each["config"] is None else ReductionConfig.from_dict(each["config"]) for each in done]
    apply = Reducible(model, None, "").apply
    for result, speed in zip(done, speeds_in_turns(model, timed, [inputs], _TURNS, apply), strict=True):
        result.update(speed)
    write_json(output / "results.json", {**report, "results": done})  # as `agglo evaluate` does
    plot(report, output / "accuracy.png", METRICS)
    half = {config: name for config, name in configs.items() if config.keep_rate == 0.5}
    chosen, names = [0, count // 2][:count], ["image 1", "image 2"][:count]
    drawn = seen[chosen].expand(-1, 3, -1, -1)
    sheet = draw_configs(model, inputs[chosen], drawn, half, names=names, classes=split.classes, scale=_SCALE)
    sheet.save(output / "groups.png")
    return report


def keep_rate_of(result: Mapping[str, Any]) -> float | None:
    """Return the keep rate of a result; None for the dense model."""
    return None if result["config"] is None else result["config"]["keep_rate"]


def summary(report: dict[str, Any]) -> str:
    """Return the report of `show` as text: accuracy and speed of every method at every keep rate."""
    results = {(result["name"], keep_rate_of(result)): result for result in report["results"]}
    dense = results["dense", None]
    rates = sorted({rate for _, rate in results if rate is not None}, reverse=True)
    names = dict.fromkeys(name for name, rate in results if rate is not None)

    def cell(result: dict[str, Any]) -> str:
        if "cannot" in result:
            return CANNOT
        return f"{result['top1']:.1f}  {result['images_per_second'] / dense['images_per_second']:.2f}x"

    columns = [Column("", left=True), *(Column(f"keep {rate:g}") for rate in rates)]
    rows = [["dense", cell(dense), *[None] * (len(rates) - 1)]]
    rows += [[name, *(cell(results[name, rate]) for rate in rates)] for name in names]
    data, machine = report["data"], report["machine"]
    lines = [
        f"{report['model']['name']} on {data['images']} images of {data['classes']} classes ({data['name']})",
        "top-1 in percent, and speed against dense:\n",
        f"{Table(columns, rows).text()}\n",
        f"dense: {dense['images_per_second']:.0f} images per second on {machine['gpu'] or machine['cpu']}, "
        f"{report['settings']['threads']} threads; all timed in turns",
        f"sampling error of top-1: about {sampling_error(dense['top1'], data['images']):.1f} points",
        load_warning(machine),
    ]
    return "\n".join(filter(None, lines))


def draw_photo(path: Path = PHOTO) -> Image:
    """Draw a photo, then cuts of one tree over its patches, in one row."""
    image = whole_patches(open_image(path))
    features = patch_colours(image)
    tree = linkage(features, "complete", metric="euclidean")
    grid = tuple(side // _PATCH for side in image.shape[:2])
    panels = [Panel(image, f"{len(features)} patches")]
    for count in _GROUPS:
        if count < len(features):
            labels = first_members(cut(tree, count)[None])[0].reshape(grid)
            # Patches this small leave no room for lines between them.
            panels.append(Panel(draw_groups(image, labels, scale=1, wash=1, thickness=0), f"{count} groups"))
    about = f"{path.name}: patches of {_PATCH} pixels, compared by their colours alone (complete linkage, no model)"
    return compose([Row(panels, about)])


def whole_patches(photo: Image) -> Pixels:
    """Return a photo as pixels (H, W, 3) of whole patches, shrunk to a size to look at; the rest is cut off."""
    factor = _LONG_SIDE / max(photo.size)
    width, height = (round(side * factor) // _PATCH * _PATCH for side in photo.size)
    if not width or not height:
        raise ValueError(f"a photo of {photo.width}x{photo.height} pixels is too long and narrow to draw groups on")
    return np.asarray(photo.resize((round(photo.width * factor), round(photo.height * factor))))[:height, :width]


def patch_colours(image: Pixels) -> Tensor:
    """Return mean and deviation of red, green and blue in every patch of an image (H, W, 3): (N, 6), in 0 to 1."""
    pixels = torch.from_numpy(image.copy()).float().div(255).unfold(0, _PATCH, _PATCH).unfold(1, _PATCH, _PATCH)
    patches = pixels.flatten(0, 1).flatten(2)  # (N, 3, pixels)
    return torch.cat([patches.mean(dim=-1), patches.std(dim=-1, correction=0)], dim=1)


def show_generated(output: Path) -> None:
    """Write generated.png into the output folder: one row per class, dense, with ToMe and with ATC."""
    from agglo.lab.tasks.synthesis.data.requests import fashion_requests
    from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator
    from agglo.lab.tasks.synthesis.evaluation.grid import DENSE, cells_of, contact_sheet, generate

    cells, requests = cells_of([DENSE, "tomesd", "atc"], [0.5]), fashion_requests(1, classes=_CLASSES)
    with TemporaryDirectory() as folder:
        generate(EmbeddedGenerator(), cells, requests, Path(folder), batch_size=len(requests))
        contact_sheet(Path(folder), cells, requests).save(output / "generated.png")
