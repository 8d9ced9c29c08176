"""Not in the paper: every option of merging in a diffusion model, by the error of its output against the dense one's.

Two models: the embedded generator of 256 tokens, in single predictions and whole samplings, and a real pretrained U-Net
of 1024 tokens, in single calls and in successive denoising steps with groups that are kept or shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import torch
from torch import Tensor

from agglo.embedded import generator as embedded
from agglo.hosts import diffusers
from agglo.hosts.diffusers import generation
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.paper.classifiers import FASHION, data_need
from agglo.lab.paper.compare import by_rate, grouped
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, StudyCell
from agglo.lab.paper.synthesis import OWN, PAPER, reductions
from agglo.lab.tasks.synthesis.data.requests import fashion_requests
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell
from agglo.lab.tasks.synthesis.evaluation.errors import prediction_errors, relative_errors
from agglo.patch import remove
from agglo.utils.randomness import generator as random_generator
from studies import study
from studies.terrain_model import SIGMA_MAX, SIGMA_MIN, difference_to_onnx, load, prediction, terrains

Options = dict[str, dict[str, Any]]  # of a reduction, by its name
Calls = Sequence[Callable[[], Tensor]]  # predictions of a model at several noise levels

# The options that lie between the paper's ATC and agglo's own mode, and more.
COMPARED: Options = {
    "tome": {},
    "tome, first of each cell": {"use_rand": False},
    **PAPER,
    "atc-average, keys alone": {"proportional": False},
    "atc-average, proportional alone": {"features": "tokens"},
    **OWN,
    "atc-average, shared by the blocks": {"share": "resolution"},
    "atc-average, windows of 8 x 8": {"window": 8},
    "atc-average, windows of 8 x 8 by need": {"window": 8, "spread": "need"},
    "atc-average, neighbours only": {"connectivity": "grid"},
    "pool": {},
    "random": {},
}
PREDICTION, SAMPLING, ONE_CALL, OVER_STEPS = "prediction", "sampling", "one call", "successive steps"
KEEP_RATES = (0.9, 0.7, 0.5, 0.4)
STEPS, SCHEDULE = 5, 50  # successive steps from each noise level on, of so many from the most noise to the least
_TITLES = {
    PREDICTION: (
        "Relative error of a prediction against the dense one (%)",
        "{images} test images, mean over steps {levels} of 1000.",
    ),
    SAMPLING: ("Relative error of the picture after all steps against the dense one's (%)", "{images} pictures."),
    ONE_CALL: ("Relative error of the U-Net's output (%)", "{images} height maps, mean over sigma {levels}."),
    OVER_STEPS: (
        "Groups that are kept or shared",
        f"Mean of {STEPS} successive steps from each sigma on (of {SCHEDULE} in all), %; clusterings per step in "
        "brackets.",
    ),
}


class Model(NamedTuple):
    """What is compared of a model: parts of its table with their reductions."""

    parts: Mapping[str, Options]
    needs: tuple[Need, ...]
    keep_rates: Sequence[float] = KEEP_RATES

    def cells(self) -> dict[tuple[str, str, float | None], GenerationCell]:
        """Return reductions by part, name and keep rate."""
        found = {part: reductions(options, self.keep_rates) for part, options in self.parts.items()}
        return {(part, *key): cell for part, of in found.items() for key, cell in of.items()}


def _axes(model: Model, settings: Settings) -> Iterator[StudyCell]:
    for part, method, rate in model.cells():
        yield StudyCell({"part": part, "method": method, "keep_rate": rate}, model.needs)


def _errors(model: Any, cell: GenerationCell, calls: Calls) -> dict[str, Any]:
    [errors] = prediction_errors(model, [cell], calls).values()
    return {"error": float(np.mean(errors)), "by_level": errors}


def _table(results: Sequence[Result], model: Model) -> list[Section]:
    sections = []
    for (part,), here in grouped(results, "part").items():
        first = here[0]
        levels = ", ".join(f"{level:g}" for level in first.get("levels", first.get("sigmas", ())))
        title, text = _TITLES[part]
        sections.append(Section(title, by_rate(here, _error), text.format(images=first["images"], levels=levels)))
    return sections


def _error(result: Result) -> str:
    percent = 100 * result["error"]
    return f"{percent:.2f} ({result['clusterings']:.1f})" if "clusterings" in result else f"{percent:.1f}"


# The embedded generator.

LEVELS = (200, 500, 800)  # of 1000 steps
PREDICTED = 64  # images
REQUESTS = fashion_requests(5, seed=990_000_000)
KEPT: Options = {
    **COMPARED,
    "atc-average, kept for 5 steps": {"every": 5},
    "atc-average, kept until features moved by 0.3": {"drift": 0.3},
    "atc-average, shared by the blocks, kept for 5 steps": {"every": 5, "share": "resolution"},
}


def _run_embedded(what: Model, settings: Settings) -> RunCell:
    model, cells = embedded.trained(), what.cells()
    calls = noised_predictions(model, settings.data[FASHION])
    dense = sampled(model, GenerationCell("dense"))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell = cells[about["part"], about["method"], about["keep_rate"]]
        if about["part"] == PREDICTION:
            return {**_errors(model, cell, calls), "images": PREDICTED, "levels": LEVELS}
        return {"error": float(relative_errors(sampled(model, cell), dense).mean()), "images": len(REQUESTS)}

    return run


def noised_predictions(model: Any, data: Path) -> Calls:
    """Return calls of the embedded model on noised test images, one for each level."""
    from diffusers import DDPMScheduler

    images, labels = read_split(data, "val")
    clean = embedded.to_model(torch.from_numpy(images[:PREDICTED].copy())[:, None])
    classes = torch.from_numpy(labels[:PREDICTED].copy()).long()

    def at(level: int) -> Callable[[], Tensor]:
        steps = torch.full((len(clean),), level)
        noise = torch.randn(clean.shape, generator=random_generator("mini-synthesis", level))
        noisy = DDPMScheduler(**embedded.NOISE).add_noise(clean, noise, steps)
        return lambda: model(noisy, steps, classes).sample

    return [at(level) for level in LEVELS]


def sampled(model: Any, cell: GenerationCell) -> Tensor:
    """Return the images (B, 1, H, W) that whole samplings end with."""
    cell.apply(model)
    torch.manual_seed(0)  # methods that draw draw the same for every cell
    try:
        return embedded.sample(model, [r.label for r in REQUESTS], [r.seed for r in REQUESTS], steps=20)
    finally:
        remove(model)


# The real U-Net.

WEIGHTS = "terrain_consistency_unet_difficulty100"
IMAGES, SIGMAS = 4, (0.2, 1.0, 5.0)
_POWER = 7  # of Karras et al. 2022
_MOST_APART = 1e-3  # from ONNX Runtime, of height maps in -1 to 1
# ATC grouped anew at every step by every block, and what saves clusterings.
SUCCESSIVE: Options = {
    "atc-average": {},
    "atc-average, shared by the blocks": {"share": "resolution"},
    f"atc-average, kept for {STEPS} steps": {"every": STEPS},
    f"atc-average, shared by the blocks, kept for {STEPS} steps": {"share": "resolution", "every": STEPS},
    **{f"atc-average, kept until they drift by {drift:g}": {"drift": drift} for drift in (0.05, 0.1, 0.2, 0.4)},
    f"atc-average, windows of 8 x 8, kept for {STEPS} steps": {"window": 8, "every": STEPS},
}


def _run_terrain(what: Model, settings: Settings) -> RunCell:
    path, cells = settings.weights[WEIGHTS], what.cells()
    model = load(path)
    apart = difference_to_onnx(model, path)
    if apart > _MOST_APART:
        raise ValueError(f"weights={str(path)!r}: the model is {apart:.2g} apart from ONNX Runtime, not the same one")
    clean, difficulty = terrains(model, IMAGES)
    calls = [prediction(model, clean, difficulty, level) for level in SIGMAS]
    schedule = karras_sigmas(SIGMA_MAX, SIGMA_MIN)
    starts = [next(number for number, sigma in enumerate(schedule) if sigma <= level) for level in SIGMAS]
    paths = [successive(model, clean, difficulty, schedule[start : start + STEPS]) for start in starts]
    common = {"images": IMAGES, "sigmas": SIGMAS, "difference_to_onnx": apart}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell = cells[about["part"], about["method"], about["keep_rate"]]
        found = error_over_steps(model, cell, paths) if about["part"] == OVER_STEPS else _errors(model, cell, calls)
        return {**found, **common}

    return run


def karras_sigmas(most: float, least: float) -> list[float]:
    """Return the noise levels of a whole generation."""
    high, low = most ** (1 / _POWER), least ** (1 / _POWER)
    return [(high + number / (SCHEDULE - 1) * (low - high)) ** _POWER for number in range(SCHEDULE)]


@torch.no_grad()
def successive(model: Any, clean: Tensor, difficulty: Tensor, sigmas: Sequence[float]) -> Calls:
    """Return calls of the model at successive noise levels, on the path of the dense model's Euler steps."""
    noise = torch.randn(clean.shape, generator=random_generator("terrain steps", sigmas[0]))
    noisy = clean + sigmas[0] * noise
    calls: list[Callable[[], Tensor]] = []
    for sigma, following in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
        level = torch.full((len(clean),), sigma)
        calls.append(partial(model.predict, noisy, level, difficulty))
        denoised = model(noisy, level, difficulty)
        noisy = denoised + following / sigma * (noisy - denoised)
    return calls


@torch.no_grad()
def error_over_steps(model: Any, cell: GenerationCell, paths: Sequence[Calls]) -> dict[str, Any]:
    """Return the mean relative error, that of each path, and how often the model clustered per step.

    A path is one generation: calls at successive steps.
    """
    remove(model)
    dense = [[predict() for predict in path] for path in paths]
    try:
        cell.apply(model)
        [denoiser] = diffusers.applied(model)
        method: Any = denoiser.agglo_applied.method  # type: ignore[union-attr]
        counting = Mock(wraps=method.reduce)
        by_path = []
        with patch.object(method, "reduce", counting):
            for path, right in zip(paths, dense, strict=True):
                with generation():
                    errors = [relative_errors(call(), there) for call, there in zip(path, right, strict=True)]
                by_path.append(mean(float(error.mean()) for error in errors))
    finally:
        remove(model)
    return {"error": mean(by_path), "by_level": by_path, "clusterings": counting.call_count / sum(map(len, paths))}


_ONNX = "the .onnx file in the package adaptive-terrain-diffusion"
ITEMS = (
    study(
        name="diffusion-options",
        about="Error of the embedded generator's output for every option of merging: keys or block inputs, "
        "proportional attention, linkages, windows, neighbours only, groups shared or kept for steps",
        stands_in="Single predictions on test images of Fashion-MNIST, and whole samplings.",
        full=None,
        miniature=Model({PREDICTION: COMPARED, SAMPLING: KEPT}, (data_need(FASHION),)),
        axes=_axes,
        run=_run_embedded,
        table=_table,
    ),
    study(
        name="terrain",
        about="Relative error of a real pretrained U-Net's output (height maps, 1024 tokens), for every option of "
        "merging: single calls at three noise levels, and five successive steps with groups kept or shared",
        full=Model(
            {ONE_CALL: {**COMPARED, "atc-average, windows of 16 x 16": {"window": 16}}, OVER_STEPS: SUCCESSIVE},
            (
                Need("weights", WEIGHTS, _ONNX),
                *(Need("extra", name, "reads and checks that file") for name in ("onnx", "onnxruntime")),
            ),
        ),
        miniature=None,
        axes=_axes,
        run=_run_terrain,
        table=_table,
    ),
)
