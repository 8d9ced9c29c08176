"""Not in the paper: every option of merging in the embedded diffusion model, by the error of its output.

In single predictions on noised test images, and in whole samplings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.embedded import generator as embedded
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.paper.classifiers import FASHION, data_need
from agglo.lab.paper.compare import by_rate, grouped
from agglo.lab.paper.items.diffusion import OWN, PAPER, Reductions, reductions
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, StudyCell
from agglo.lab.tasks.synthesis.data.requests import fashion_requests
from agglo.lab.tasks.synthesis.evaluation.grid import GenerationCell, relative_errors
from agglo.patch import remove
from agglo.utils.randomness import generator as random_generator
from studies import study

PREDICTION, SAMPLING = "prediction", "sampling"
KEEP_RATES = (0.9, 0.7, 0.5, 0.4)
LEVELS = (200, 500, 800)  # of 1000 steps
PREDICTED = 64  # images
REQUESTS = fashion_requests(5, seed=990_000_000)
# The options that lie between the paper's ATC and agglo's own mode, and more.
COMPARED: dict[str, dict[str, Any]] = {
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
KEPT: dict[str, dict[str, Any]] = {
    **COMPARED,
    "atc-average, kept for 5 steps": {"every": 5},
    "atc-average, kept until features moved by 0.3": {"drift": 0.3},
    "atc-average, shared by the blocks, kept for 5 steps": {"every": 5, "share": "resolution"},
}
Parts = Mapping[str, Reductions]  # reductions by the part of the study
PARTS = {PREDICTION: reductions(COMPARED, KEEP_RATES), SAMPLING: reductions(KEPT, KEEP_RATES)}


def cells_of(parts: Parts, *needs: Need) -> Iterator[StudyCell]:
    """Yield the cells of all reductions of all parts."""
    for part, cells in parts.items():
        for method, rate in cells:
            yield StudyCell({"part": part, "method": method, "keep_rate": rate}, needs)


def _run(parts: Parts, settings: Settings) -> RunCell:
    model = embedded.trained()
    calls = noised_predictions(model, settings.data[FASHION])
    dense = sampled(model, GenerationCell("dense"))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell = parts[about["part"]][about["method"], about["keep_rate"]]
        if about["part"] == SAMPLING:
            return {"error": float(relative_errors(sampled(model, cell), dense).mean()), "images": len(REQUESTS)}
        errors = prediction_errors(model, cell, calls)
        return {"error": float(np.mean(errors)), "by_level": errors, "images": PREDICTED, "levels": LEVELS}

    return run


def noised_predictions(model: Any, data: Path) -> Sequence[Callable[[], Tensor]]:
    """Return calls of the embedded model on noised test images, one for each level."""
    from diffusers import DDPMScheduler

    images, labels = read_split(data, "val")
    clean = embedded.to_model(torch.from_numpy(images[:PREDICTED].copy())[:, None])
    classes = torch.from_numpy(labels[:PREDICTED].copy()).long()
    calls = []
    for level in LEVELS:
        steps = torch.full((len(clean),), level)
        noise = torch.randn(clean.shape, generator=random_generator("mini-synthesis", level))
        noisy = DDPMScheduler(**embedded.NOISE).add_noise(clean, noise, steps)
        calls.append(lambda noisy=noisy, steps=steps: model(noisy, steps, classes).sample)
    return calls


@torch.no_grad()
def prediction_errors(model: Any, cell: GenerationCell, calls: Sequence[Callable[[], Tensor]]) -> list[float]:
    """Return the mean relative error of each call."""
    remove(model)
    dense = [call() for call in calls]
    cell.apply(model)
    torch.manual_seed(0)  # methods that draw draw the same for every cell
    return [float(relative_errors(call(), right).mean()) for call, right in zip(calls, dense, strict=True)]


def sampled(model: Any, cell: GenerationCell) -> Tensor:
    """Return the images (B, 1, H, W) that whole samplings end with."""
    cell.apply(model)
    torch.manual_seed(0)  # methods that draw draw the same for every cell
    return embedded.sample(model, [r.label for r in REQUESTS], [r.seed for r in REQUESTS], steps=20)


def _table(results: Sequence[Result], parts: Parts) -> list[Section]:
    sections = []
    for (part,), here in grouped(results, "part").items():
        title, text = "Relative error of the image after all steps against the dense one's (%)", "{images} images."
        if part == PREDICTION:
            title = "Relative error of a prediction against the dense one (%)"
            text = f"{{images}} test images, mean over steps {', '.join(map(str, LEVELS))} of 1000."
        table = by_rate(here, lambda result: 100 * result["error"], ".1f")
        sections.append(Section(title, table, text.format(images=here[0]["images"])))
    return sections


ITEMS = (
    study(
        name="diffusion-options",
        about="Error of the embedded generator's output for every option of merging: keys or block inputs, "
        "proportional attention, linkages, windows, neighbours only, groups shared or kept for steps",
        stands_in="Single predictions on test images of Fashion-MNIST, and whole samplings.",
        full=None,
        miniature=PARTS,
        axes=lambda parts, settings: cells_of(parts, data_need(FASHION)),
        run=_run,
        table=_table,
    ),
)
