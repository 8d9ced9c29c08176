"""Not in the paper: merging in a real pretrained U-Net of 1024 tokens, by the error of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agglo.reproduce.compare import grouped
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.items.beyond import BEYOND
from agglo.reproduce.items.diffusion_options import by_rate
from agglo.reproduce.synthesis import Ways, compared_cells, renamed, ways_of
from agglo.reproduce.terrain_model import SIGMA_MAX, SIGMA_MIN, difference_to_onnx, load, prediction, terrains
from agglo.reproduce.terrain_steps import SCHEDULE, STEPS, error_over_steps, karras_sigmas, step_cells, successive
from agglo.synthesis.evaluation.cells import cells_of
from agglo.synthesis.evaluation.errors import prediction_errors

WEIGHTS = "terrain_consistency_unet_difficulty100"
RATES = (0.9, 0.7, 0.5, 0.4)
SIGMAS = (0.2, 1.0, 5.0)
ONE_CALL, OVER_STEPS = "one call", "successive steps"
_CALL = 2 * 8.8e9  # multiply-adds of a height map, reduced and dense
_MOST_APART = 1e-3  # from ONNX Runtime, of height maps in -1 to 1


class Terrain(Item):
    name = "terrain"
    shows = BEYOND
    about = (
        "Relative error of a real pretrained U-Net's output (height maps, 1024 tokens), for every option of merging: "
        "single calls at three noise levels, and five successive steps with groups kept or shared"
    )
    in_miniature = False

    def __init__(self, images: int = 4, rates: tuple[float, ...] = RATES) -> None:
        self._images, self._rates = images, rates

    def needs(self, miniature: bool) -> Sequence[Need]:
        where = "the .onnx file in the package adaptive-terrain-diffusion"
        extras = [Need("extra", name, "reads and checks that file") for name in ("onnx", "onnxruntime")]
        return [Need("weights", WEIGHTS, where), *extras]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        needs = (WEIGHTS, "onnx", "onnxruntime")
        return [
            Cell({"part": part, "method": method, "keep_rate": rate}, needs, self._images * calls * _CALL)
            for part, ways, calls in (
                (ONE_CALL, single_ways(self._rates), len(SIGMAS)),
                (OVER_STEPS, ways_of(step_cells(self._rates)), len(SIGMAS) * STEPS),
            )
            for method, rate in ways
        ]

    def open(self, settings: Settings) -> RunCell:
        path = settings.weights[WEIGHTS]
        model = load(path)
        apart = difference_to_onnx(model, path)
        if apart > _MOST_APART:
            raise ValueError(
                f"weights={str(path)!r}: the model is {apart:.2g} apart from ONNX Runtime, not the same one"
            )
        clean, difficulty = terrains(model, self._images)
        calls = [prediction(model, clean, difficulty, level) for level in SIGMAS]
        schedule = karras_sigmas(SIGMA_MAX, SIGMA_MIN)
        starts = [next(number for number, sigma in enumerate(schedule) if sigma <= level) for level in SIGMAS]
        paths = [successive(model, clean, difficulty, schedule[start : start + STEPS]) for start in starts]
        single, steps = single_ways(self._rates), ways_of(step_cells(self._rates))
        about = {"images": self._images, "sigmas": SIGMAS, "difference_to_onnx": apart}

        def run(cell: Cell) -> dict[str, Any]:
            place = (cell.about["method"], cell.about["keep_rate"])
            if cell.about["part"] == OVER_STEPS:
                return {**error_over_steps(model, steps[place], paths), **about}
            [errors] = prediction_errors(model, [single[place]], calls).values()
            return {"error": float(np.mean(errors)), "by_level": errors, **about}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        found = []
        for (part,), here in grouped(results, "part").items():
            levels = ", ".join(f"{sigma:g}" for sigma in here[0]["sigmas"])
            if part == ONE_CALL:
                text = f"{here[0]['images']} height maps, mean over sigma {levels}."
                table = by_rate(here, lambda result: f"{100 * result['error']:.1f}")
                found.append(Section("Relative error of the U-Net's output (%)", table, text))
            else:
                text = (
                    f"Mean of {STEPS} successive steps from each sigma on (of {SCHEDULE} in all), %; clusterings per "
                    "step in brackets."
                )
                table = by_rate(here, lambda result: f"{100 * result['error']:.2f} ({result['clusterings']:.1f})")
                found.append(Section("Groups that are kept or shared", table, text))
        return found


def single_ways(keep_rates: Sequence[float]) -> Ways:
    """Every method and option, and larger windows."""
    wide = cells_of(["atc"], keep_rates, common={"window": 16})
    return ways_of([*compared_cells(keep_rates), *renamed("atc-average, windows of 16 x 16", wide)])


ITEMS = (Terrain(),)
