"""How far a reduced model's prediction is from the dense one's at equal noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agglo import patching
from agglo.synthesis.evaluation.cells import Cell


def relative_errors(reduced: Tensor, dense: Tensor) -> Tensor:
    """(B,): the norm of the difference of each image in proportion to the dense one's."""
    difference = (reduced.float() - dense.float()).flatten(1).norm(dim=1)
    return difference / dense.float().flatten(1).norm(dim=1)


@torch.no_grad()
def prediction_errors(
    model: Any, cells: Sequence[Cell], predictions: Sequence[Callable[[], Tensor]]
) -> dict[str, list[float]]:
    """By cell: the mean relative error of each of several predictions.

    predictions: call the model, at several noise levels for example, (B, ...); they run with every cell applied.
    """
    patching.remove(model)
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
        patching.remove(model)
    return found
