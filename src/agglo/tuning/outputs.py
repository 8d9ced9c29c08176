"""What of a model's answer is compared: the tensor that a person would call its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from agglo.experiments.libraries import class_count
from agglo.experiments.outputs import call

Output = Callable[[Any, Any], Any]


def output_of(model: nn.Module) -> Output:
    """What is compared unless the user says otherwise: of agglo's detectors the feature pyramid, of other models the
    answer itself."""
    if type(model).__module__.startswith("agglo.detection"):
        return submodule_output("neck")
    return lambda module, inputs: call(module, inputs)


def submodule_output(name: str) -> Output:
    """What a submodule gives while the whole model runs: `output=submodule_output("neck")`."""

    def output(model: nn.Module, inputs: Any) -> Any:
        seen: list[Any] = []
        handle = model.get_submodule(name).register_forward_hook(lambda module, given, found: seen.append(found))
        try:
            call(model, inputs)
        finally:
            handle.remove()
        return seen[-1]

    return output


def objective_for(model: Any, name: str | None, tensors: Any, has_labels: bool) -> str:
    """ "kl" where outputs are logits: by their name, by the model's number of classes, or because there are labels;
    "relative" otherwise."""
    if not isinstance(tensors, Tensor) or tensors.dim() < 2:
        return "relative"
    is_head = tensors.dim() == 2 and class_count(model) == tensors.shape[-1]
    return "kl" if name == "logits" or (name is None and (is_head or has_labels)) else "relative"
