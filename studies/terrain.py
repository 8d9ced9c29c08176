"""Not in the paper: merging in a real pretrained U-Net of 1024 tokens, by the error of its output.

Single calls, and groupings that are kept over successive denoising steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.hosts import diffusers
from agglo.hosts.diffusers import generation
from agglo.lab.paper.compare import grouped
from agglo.lab.paper.study import Cell, Need, Result, RunCell, Section, Settings
from agglo.lab.paper.synthesis import COMPARED, Options, by_rate, reductions
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell
from agglo.lab.tasks.synthesis.evaluation.errors import prediction_errors, relative_errors
from agglo.utils.randomness import generator as random_generator
from studies import study
from studies.terrain_model import SIGMA_MAX, SIGMA_MIN, difference_to_onnx, load, prediction, terrains

WEIGHTS = "terrain_consistency_unet_difficulty100"
IMAGES = 4
SIGMAS = (0.2, 1.0, 5.0)
SCHEDULE = 50  # steps from the most noise to the least
STEPS = 5  # successive ones that are looked at, from each noise level on
_POWER = 7  # of Karras et al. 2022
ONE_CALL, OVER_STEPS = "one call", "successive steps"
_MOST_APART = 1e-3  # from ONNX Runtime, of height maps in -1 to 1


# Every method and option, and larger windows.
SINGLE: Options = {**COMPARED, "atc-average, windows of 16 x 16": {"window": 16}}
# ATC grouped anew at every step by every block, and what saves clusterings.
SUCCESSIVE: Options = {
    "atc-average": {},
    "atc-average, shared by the blocks": {"share": "resolution"},
    f"atc-average, kept for {STEPS} steps": {"every": STEPS},
    f"atc-average, shared by the blocks, kept for {STEPS} steps": {"share": "resolution", "every": STEPS},
    **{f"atc-average, kept until they drift by {drift:g}": {"drift": drift} for drift in (0.05, 0.1, 0.2, 0.4)},
    f"atc-average, windows of 8 x 8, kept for {STEPS} steps": {"window": 8, "every": STEPS},
}
PARTS = {ONE_CALL: SINGLE, OVER_STEPS: SUCCESSIVE}


def _axes(keep_rates: Sequence[float], settings: Settings) -> Iterator[Cell]:
    where = "the .onnx file in the package adaptive-terrain-diffusion"
    extras = [Need("extra", name, "reads and checks that file") for name in ("onnx", "onnxruntime")]
    needs = (Need("weights", WEIGHTS, where), *extras)
    for part, options in PARTS.items():
        for method, rate in reductions(options, keep_rates):
            yield Cell({"part": part, "method": method, "keep_rate": rate}, needs)


def _run(keep_rates: Sequence[float], settings: Settings) -> RunCell:
    path = settings.weights[WEIGHTS]
    model = load(path)
    apart = difference_to_onnx(model, path)
    if apart > _MOST_APART:
        raise ValueError(f"weights={str(path)!r}: the model is {apart:.2g} apart from ONNX Runtime, not the same one")
    clean, difficulty = terrains(model, IMAGES)
    calls = [prediction(model, clean, difficulty, level) for level in SIGMAS]
    schedule = karras_sigmas(SIGMA_MAX, SIGMA_MIN)
    starts = [next(number for number, sigma in enumerate(schedule) if sigma <= level) for level in SIGMAS]
    paths = [successive(model, clean, difficulty, schedule[start : start + STEPS]) for start in starts]
    cells = {part: reductions(options, keep_rates) for part, options in PARTS.items()}
    common = {"images": IMAGES, "sigmas": SIGMAS, "difference_to_onnx": apart}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell = cells[about["part"]][about["method"], about["keep_rate"]]
        if about["part"] == OVER_STEPS:
            return {**error_over_steps(model, cell, paths), **common}
        [errors] = prediction_errors(model, [cell], calls).values()
        return {"error": float(np.mean(errors)), "by_level": errors, **common}

    return run


def _table(results: Sequence[Result], keep_rates: Sequence[float]) -> list[Section]:
    found = []
    for (part,), here in grouped(results, "part").items():
        levels = ", ".join(f"{sigma:g}" for sigma in here[0]["sigmas"])
        if part == ONE_CALL:
            text = f"{here[0]['images']} height maps, mean over sigma {levels}."
            table = by_rate(here, lambda result: f"{100 * result['error']:.1f}")
            found.append(Section("Relative error of the U-Net's output (%)", table, text))
        else:
            text = (
                f"Mean of {STEPS} successive steps from each sigma on (of {SCHEDULE} in all), %; clusterings per step "
                "in brackets."
            )
            table = by_rate(here, lambda result: f"{100 * result['error']:.2f} ({result['clusterings']:.1f})")
            found.append(Section("Groups that are kept or shared", table, text))
    return found


def karras_sigmas(most: float, least: float) -> list[float]:
    """Return the noise levels of a whole generation."""
    high, low = most ** (1 / _POWER), least ** (1 / _POWER)
    return [(high + number / (SCHEDULE - 1) * (low - high)) ** _POWER for number in range(SCHEDULE)]


@torch.no_grad()
def successive(model: Any, clean: Tensor, difficulty: Tensor, sigmas: Sequence[float]) -> list[Callable[[], Tensor]]:
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
def error_over_steps(
    model: Any, cell: GenerationCell, paths: Sequence[Sequence[Callable[[], Tensor]]]
) -> dict[str, Any]:
    """Return the mean relative error, that of each path, and how often the model clustered per step.

    A path is one generation: calls at successive steps.
    """
    GenerationCell("dense").apply(model)
    dense = [[predict() for predict in path] for path in paths]
    try:
        cell.apply(model)
        asked = _counted(model)
        by_path = []
        for path, right in zip(paths, dense, strict=True):
            with generation():
                errors = [relative_errors(call(), there) for call, there in zip(path, right, strict=True)]
            by_path.append(mean(float(error.mean()) for error in errors))
    finally:
        GenerationCell("dense").apply(model)
    return {"error": mean(by_path), "by_level": by_path, "clusterings": len(asked) / sum(map(len, paths))}


def _counted(model: Any) -> list[int]:
    """Return a list that grows with every clustering of a reduced model."""
    [denoiser] = diffusers.applied(model)
    method: Any = denoiser.agglo_applied.method  # type: ignore[union-attr]
    asked: list[int] = []
    reduce = method.reduce

    def counting(view: Any) -> Any:
        asked.append(1)
        return reduce(view)

    vars(method)["reduce"] = counting
    return asked


TERRAIN = study(
    name="terrain",
    about="Relative error of a real pretrained U-Net's output (height maps, 1024 tokens), for every option of merging: "
    "single calls at three noise levels, and five successive steps with groups kept or shared",
    full=(0.9, 0.7, 0.5, 0.4),
    miniature=None,
    axes=_axes,
    run=_run,
    table=_table,
)
ITEMS = (TERRAIN,)
