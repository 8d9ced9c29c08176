"""Groupings of the terrain U-Net that are kept over successive denoising steps: what that costs in error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from agglo.experiments.randomness import generator as random_generator
from agglo.hosts import diffusion
from agglo.hosts.diffusion import generation
from agglo.reproduce.synthesis import renamed
from agglo.synthesis.evaluation.cells import Cell, cells_of
from agglo.synthesis.evaluation.errors import relative_errors

SCHEDULE = 50  # steps from the most noise to the least
STEPS = 5  # successive ones that are looked at, from each noise level on
_POWER = 7  # of Karras et al. 2022


def step_cells(keep_rates: Sequence[float]) -> list[Cell]:
    """Grouped anew at every step by every block, and what saves clusterings."""
    savings: dict[str, dict[str, Any]] = {
        "shared by the blocks": {"share": "resolution"},
        f"kept for {STEPS} steps": {"every": STEPS},
        f"shared by the blocks, kept for {STEPS} steps": {"share": "resolution", "every": STEPS},
        **{f"kept until they drift by {drift:g}": {"drift": drift} for drift in (0.05, 0.1, 0.2, 0.4)},
        f"windows of 8 x 8, kept for {STEPS} steps": {"window": 8, "every": STEPS},
    }
    cells = cells_of(["atc"], keep_rates)
    for name, common in savings.items():
        cells += renamed(f"atc-average, {name}", cells_of(["atc"], keep_rates, common=common))
    return cells


def karras_sigmas(most: float, least: float) -> list[float]:
    """Noise levels of a whole generation."""
    high, low = most ** (1 / _POWER), least ** (1 / _POWER)
    return [(high + number / (SCHEDULE - 1) * (low - high)) ** _POWER for number in range(SCHEDULE)]


@torch.no_grad()
def successive(model: Any, clean: Tensor, difficulty: Tensor, sigmas: Sequence[float]) -> list[Callable[[], Tensor]]:
    """Calls of the model at successive noise levels, on a path that the dense model drives: Euler steps of the
    probability flow."""
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
def error_over_steps(model: Any, cell: Cell, paths: Sequence[Sequence[Callable[[], Tensor]]]) -> dict[str, Any]:
    """Mean relative error, that of each path, and how often it clustered per step.

    paths: calls at successive steps; each path is one generation.
    """
    Cell("dense").apply(model)
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
        Cell("dense").apply(model)
    return {"error": mean(by_path), "by_level": by_path, "clusterings": len(asked) / sum(map(len, paths))}


def _counted(model: Any) -> list[int]:
    """A list that grows with every clustering of a reduced model."""
    [denoiser] = diffusion.applied(model)
    method: Any = denoiser.agglo_setup.plan.method  # type: ignore[union-attr]
    asked: list[int] = []
    reduce = method.reduce

    def counting(view: Any) -> Any:
        asked.append(1)
        return reduce(view)

    vars(method)["reduce"] = counting
    return asked
