"""The distance between the outputs of the reduced and the dense model, which needs no labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.models.libraries import class_count
from agglo.models.outputs import call

Output = Callable[[Any, Any], Any]


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


def distances(objective: str, dense: Tensor | Sequence[Tensor], reduced: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the distance of each image's outputs (B,), the mean where there are several outputs."""
    expected, found = ([value] if isinstance(value, Tensor) else value for value in (dense, reduced))
    return torch.stack([OBJECTIVES[objective](*pair) for pair in zip(expected, found, strict=True)]).mean(dim=0)


def objective_for(model: Any, name: str | None, tensors: Any, has_labels: bool) -> str:
    """Return "kl" if outputs are logits, and "relative" otherwise.

    Args:
        model: The model that gave the outputs; its number of classes identifies logits.
        name: What the model's library calls the output, such as "logits"; None if it has no name.
        tensors: The outputs.
        has_labels: Whether images have labels, which only logits can be compared with.
    """
    if not isinstance(tensors, Tensor) or tensors.dim() < 2:
        return "relative"
    is_head = tensors.dim() == 2 and class_count(model) == tensors.shape[-1]
    return "kl" if name == "logits" or (name is None and (is_head or has_labels)) else "relative"


def submodule_output(name: str) -> Output:
    """Return a function that gives what a submodule returns while the whole model runs.

    Use it as `TuneSettings(output=submodule_output("neck"))`.
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
