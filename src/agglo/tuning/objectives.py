"""Which output of a model is compared, and how far the reduced one is from the dense one, without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import choice
from agglo.models.libraries import class_count
from agglo.models.outputs import call

Output = Callable[[Any, Any], Any]
Tensors = Tensor | Sequence[Tensor]
Objective = Callable[[Tensors, Tensors], Tensor]


def kl(dense: Tensor, reduced: Tensor) -> Tensor:
    """Return the KL divergence of the softmax of logits (B, ..., classes), averaged over positions in between: (B,)."""
    expected = F.log_softmax(dense.float(), dim=-1)
    found = F.log_softmax(reduced.float(), dim=-1)
    return (expected.exp() * (expected - found)).sum(dim=-1).reshape(len(dense), -1).mean(dim=1)


def relative(dense: Tensor, reduced: Tensor) -> Tensor:
    """Return |reduced - dense| / |dense| of outputs (B, ...), all values of an image in one vector: (B,)."""
    expected, found = (output.float().reshape(len(dense), -1) for output in (dense, reduced))
    return (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-12)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "relative": relative}
TITLES = {"kl": "KL to the dense output", "relative": "relative error"}


def objective_named(objective: str | Objective) -> Objective:
    """Return an objective by its name, averaged over outputs where there are several; a function is returned itself."""
    if callable(objective):
        return objective
    one = OBJECTIVES[choice("objective", objective, OBJECTIVES, also=", or a function of both outputs")]

    def mean(dense: Tensors, reduced: Tensors) -> Tensor:
        expected, found = ([value] if isinstance(value, Tensor) else value for value in (dense, reduced))
        return torch.stack([one(*pair) for pair in zip(expected, found, strict=True)]).mean(dim=0)

    return mean


def objective_for(model: Any, name: str | None, tensors: Any, has_labels: bool) -> str:
    """Return "kl" if outputs are logits, and "relative" otherwise.

    Args:
        model: The model that gave the outputs; its number of classes tells logits.
        name: What the model's library calls the output, such as "logits"; None if it has no name.
        tensors: The outputs.
        has_labels: Whether images have labels, which only logits can be compared with.
    """
    if not isinstance(tensors, Tensor) or tensors.dim() < 2:
        return "relative"
    is_head = tensors.dim() == 2 and class_count(model) == tensors.shape[-1]
    return "kl" if name == "logits" or (name is None and (is_head or has_labels)) else "relative"


def output_of(model: nn.Module) -> Output:
    """Return the function whose result is compared by default: a detector's feature pyramid, a model's output."""
    if type(model).__module__.startswith("agglo.lab.tasks.detection"):
        return submodule_output("neck")
    return call


def submodule_output(name: str) -> Output:
    """Return a function that gives what a submodule returns while the whole model runs.

    Use it as `agglo.tune(..., output=submodule_output("neck"))`.
    """

    def output(model: nn.Module, inputs: Any) -> Any:
        seen: list[Any] = []
        handle = model.get_submodule(name).register_forward_hook(lambda module, given, found: seen.append(found))
        try:
            call(model, inputs)
        finally:
            handle.remove()
        return seen[-1]

    return output
