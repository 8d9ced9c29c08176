"""The demo: what token reduction does to one classifier, as a table, a plot and images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agglo.config import ReductionConfig
from agglo.embedded import classifier as embedded
from agglo.lab.demo.photo import draw_photo
from agglo.lab.evaluation.cells import Reducible
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.tasks.classification.data import detect, open_split
from agglo.lab.tasks.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation.figures import draw_configs, visualize
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings, run
from agglo.lab.tasks.classification.evaluation.report import plot
from agglo.models.opening import ModelSpec, build
from agglo.utils.files import write_json
from agglo.utils.timing import speeds_in_turns

KEEP_RATES = (0.9, 0.7, 0.5, 0.25)
LINKAGES = ("single", "average", "complete")
EMBEDDED = ModelSpec(embedded.NAME, pretrained=True)
_DRAWN = 2  # images
_DRAWN_SIDE = 280  # pixels, at least
_TIMED_BATCH, _TURNS = 64, 5


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
    _time_in_turns(report, model, inputs)
    _write(report, output / "results.json")
    plot(report, output / "accuracy.png")
    half = {config: name for config, name in configs.items() if config.keep_rate == 0.5}
    chosen = [len(inputs) * index // _DRAWN for index in range(min(_DRAWN, len(inputs)))]
    names = [f"image {number + 1}" for number in range(len(chosen))]
    scale = max(1, -(-_DRAWN_SIDE // inputs.shape[-1]))
    sheet = draw_configs(model, inputs[chosen], seen[chosen], half, names=names, classes=classes, scale=scale)
    sheet.save(output / "groups.png")
    return report


def show_photo(spec: ModelSpec, photo: Path, output: Path) -> Path:
    """Write photo.png into the output folder: a photograph in the model's groups at a keep rate of 0.5.

    The embedded model sees no colours; in its place, the photograph's patches are clustered by their colours.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / "photo.png"
    if spec == EMBEDDED:
        draw_photo(photo).save(path)
    else:
        visualize(spec, [photo], configs_of(("tome", "atc"), keep_rates=[0.5], linkages=LINKAGES)).save(path)
    return path


def keep_rate_of(result: Mapping[str, Any]) -> float | None:
    """Return the keep rate of a result; None for the dense model."""
    return None if result["config"] is None else result["config"]["keep_rate"]


def _write(report: dict[str, Any], path: Path) -> None:
    """Write a report as `agglo evaluate` does, which keeps apart what cannot run."""
    apart: dict[str, list[dict[str, Any]]] = {"results": [], "cannot": []}
    for result in report["results"]:
        apart["cannot" if "cannot" in result else "results"].append(result)
    write_json(path, {**report, **apart})


def _examples(model: Any, data: Path, most: int) -> tuple[Tensor, Tensor, list[str]]:
    """Return images from all over a data set as the model takes them, the same as (B, 3, H, W), and the classes."""
    name = detect(data)
    wanted = inputs_for(model, name)
    split = open_split(name, data, "val", transform=evaluation_transform(wanted, normalise=False))
    count = min(_TIMED_BATCH, most, len(split))
    chosen = torch.stack([torch.as_tensor(split[len(split) * index // count][0]) for index in range(count)])
    return Normalise(wanted.mean, wanted.std)(chosen), chosen.expand(-1, 3, -1, -1), list(split.classes)


def _time_in_turns(report: dict[str, Any], model: Any, inputs: Tensor) -> None:
    """Put speeds that can be compared into a report: those of its cells were measured one after the other."""
    done = [result for result in report["results"] if "cannot" not in result]
    configs = [result["config"] for result in done]
    timed = [None if config is None else ReductionConfig.from_dict(config) for config in configs]
    for result, speed in zip(
        done, speeds_in_turns(model, timed, [inputs], _TURNS, Reducible(model, None, "").apply), strict=True
    ):
        result.update(speed)
