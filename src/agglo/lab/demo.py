"""The demo: what token reduction does to one classifier, as a table, a plot and images. It needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agglo.clustering import cut, linkage
from agglo.config import ReductionConfig
from agglo.drawing.groups import Pixels, draw_groups, first_members
from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.data.image_files import open_image
from agglo.lab.evaluation.cells import Reducible
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.evaluation.report import sampling_error
from agglo.lab.options import EMBEDDED
from agglo.lab.tasks.classification.data import detect, open_split
from agglo.lab.tasks.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation.figures import draw_configs, visualize
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings, run
from agglo.lab.tasks.classification.evaluation.report import METRICS, main_metric, plot
from agglo.models.opening import ModelSpec, build
from agglo.utils.files import write_json
from agglo.utils.machine import load_warning
from agglo.utils.tables import CANNOT, Column, Table
from agglo.utils.timing import speeds_in_turns

if TYPE_CHECKING:
    from PIL.Image import Image

KEEP_RATES = (0.9, 0.7, 0.5, 0.25)
LINKAGES = ("single", "average", "complete")
_DRAWN, _DRAWN_SIDE = 2, 280  # images, and pixels of them at least
_TIMED_BATCH, _TURNS = 64, 5
_GROUPS = (400, 100, 25)  # of the photo
_LONG_SIDE, _PATCH = 448, 8  # pixels of the photo that are looked at, and of its patches
_CLASSES = (0, 1, 5, 7, 8, 9)  # top, trouser, sandal, sneaker, bag, boot: what is told apart at a glance


def show(spec: ModelSpec, data: Path, output: Path, *, images: int | None = None) -> dict[str, Any]:
    """Evaluate a model dense, with ToMe and with ATC, and return the report.

    accuracy.png, groups.png and results.json in the output folder take the place of an earlier demo's.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").unlink(missing_ok=True)  # a demo measures: it does not repeat what was measured before
    configs = configs_of(("tome", "atc"), keep_rates=KEEP_RATES, linkages=LINKAGES)
    report = run(EvaluationSettings(spec, data, configs, images=images), output / "results.json")
    model = build(spec)
    inputs, seen, classes = _examples(model, data, report["data"]["images"])
    # Speeds of the cells were measured one after the other; those that can be compared are measured in turns.
    done = [result for result in report["results"] if "cannot" not in result]
    timed = [None if each["config"] is None else ReductionConfig.from_dict(each["config"]) for each in done]
    apply = Reducible(model, None, "").apply
    for result, speed in zip(done, speeds_in_turns(model, timed, [inputs], _TURNS, apply), strict=True):
        result.update(speed)
    cannot = [result for result in report["results"] if "cannot" in result]
    write_json(output / "results.json", {**report, "results": done, "cannot": cannot})  # as `agglo evaluate` does
    plot(report, output / "accuracy.png")
    half = {config: name for config, name in configs.items() if config.keep_rate == 0.5}
    chosen = [len(inputs) * index // _DRAWN for index in range(min(_DRAWN, len(inputs)))]
    names = [f"image {number + 1}" for number in range(len(chosen))]
    scale = max(1, -(-_DRAWN_SIDE // inputs.shape[-1]))
    sheet = draw_configs(model, inputs[chosen], seen[chosen], half, names=names, classes=classes, scale=scale)
    sheet.save(output / "groups.png")
    return report


def _examples(model: Any, data: Path, most: int) -> tuple[Tensor, Tensor, list[str]]:
    """Return images from all over a data set as the model takes them, the same as (B, 3, H, W), and the classes."""
    name = detect(data)
    wanted = inputs_for(model, name)
    split = open_split(name, data, "val", transform=evaluation_transform(wanted, normalise=False))
    count = min(_TIMED_BATCH, most, len(split))
    chosen = torch.stack([torch.as_tensor(split[len(split) * index // count][0]) for index in range(count)])
    return Normalise(wanted.mean, wanted.std)(chosen), chosen.expand(-1, 3, -1, -1), list(split.classes)


def keep_rate_of(result: Mapping[str, Any]) -> float | None:
    """Return the keep rate of a result; None for the dense model."""
    return None if result["config"] is None else result["config"]["keep_rate"]


def summary(report: dict[str, Any]) -> str:
    """Return the report of `show` as text: accuracy and speed of every method at every keep rate."""
    metric = main_metric(report)
    results = {(result["name"], keep_rate_of(result)): result for result in report["results"]}
    dense = results["dense", None]
    rates = sorted({rate for _, rate in results if rate is not None}, reverse=True)
    names = dict.fromkeys(name for name, rate in results if rate is not None)

    def cell(result: dict[str, Any]) -> str:
        if "cannot" in result:
            return CANNOT
        return f"{result[metric]:.1f}  {result['images_per_second'] / dense['images_per_second']:.2f}x"

    columns = [Column("", left=True), *(Column(f"keep {rate:g}") for rate in rates)]
    rows = [["dense", cell(dense), *[None] * (len(rates) - 1)]]
    rows += [[name, *(cell(results[name, rate]) for rate in rates)] for name in names]
    model, data, machine = report["model"]["name"], report["data"], report["machine"]
    lines = [
        f"{model} on {data['images']} images of {data['classes']} classes ({data['name']})",
        f"{METRICS[metric]} in percent, and speed against dense:\n",
        f"{Table(columns, rows).text()}\n",
        f"dense: {dense['images_per_second']:.0f} images per second on {machine['gpu'] or machine['cpu']}, "
        f"{report['settings']['threads']} threads; all timed in turns",
    ]
    if metric != "mAP":
        error = sampling_error(dense[metric], data["images"])
        lines.append(f"sampling error of {METRICS[metric]}: about {error:.1f} points")
    if busy := load_warning(machine):
        lines.append(busy)
    return "\n".join(lines)


def show_photo(spec: ModelSpec, photo: Path, output: Path) -> None:
    """Write photo.png into the output folder: a photograph in the model's groups at a keep rate of 0.5.

    The embedded model sees no colours; in its place, the photograph's patches are clustered by their colours.
    """
    output.mkdir(parents=True, exist_ok=True)
    if spec == EMBEDDED:
        sheet = draw_photo(photo)
    else:
        sheet = visualize(spec, [photo], configs_of(("tome", "atc"), keep_rates=[0.5], linkages=LINKAGES))
    sheet.save(output / "photo.png")


def draw_photo(path: Path) -> Image:
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
    from agglo.lab.tasks.synthesis.evaluation.cells import DENSE, cells_of
    from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator
    from agglo.lab.tasks.synthesis.evaluation.grid import generate
    from agglo.lab.tasks.synthesis.evaluation.sheets import contact_sheet

    cells, requests = cells_of([DENSE, "tomesd", "atc"], [0.5]), fashion_requests(1, classes=_CLASSES)
    with TemporaryDirectory() as folder:
        generate(EmbeddedGenerator(), cells, requests, Path(folder), batch_size=len(requests))
        contact_sheet(Path(folder), cells, requests).save(output / "generated.png")
