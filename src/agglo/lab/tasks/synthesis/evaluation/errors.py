"""Errors of a reduced model's prediction against the dense model's, at equal noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agglo import patch
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell


def relative_errors(reduced: Tensor, dense: Tensor) -> Tensor:
    """Return the relative L2 error of each image, (B,)."""
    difference = (reduced.float() - dense.float()).flatten(1).norm(dim=1)
    return difference / dense.float().flatten(1).norm(dim=1)


@torch.no_grad()
def prediction_errors(
    model: Any, cells: Sequence[GenerationCell], predictions: Sequence[Callable[[], Tensor]]
) -> dict[str, list[float]]:
    """Return, by the cell's name, the mean relative error of each of several predictions.

    Args:
        model: A pipeline or diffusion model.
        cells: Its reductions.
        predictions: Functions that call the model, at several noise levels for example, and return (B, ...).
    """
    patch.remove(model)
    dense = [predict() for predict in predictions]
    found = {}
    try:
        for cell in cells:
            cell.apply(model)
            # Methods that draw draw the same for every cell.
            torch.manual_seed(0)
            results = [relative_errors(predict(), right) for predict, right in zip(predictions, dense, strict=True)]
            found[cell.name] = [float(errors.mean()) for errors in results]
    finally:
        patch.remove(model)
    return found
