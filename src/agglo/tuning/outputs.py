"""What of a model's answer is compared: the tensor that a person would call its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Output = Callable[[Any, Any], Any]

# What libraries call the output, in the order of preference.
_NAMES = ("logits", "sample", "image_embeds", "pooler_output", "last_hidden_state")


def call(model: Any, inputs: Any) -> Any:
    """A model run on a batch: a dict is its keyword arguments, a tuple its arguments, anything else its only one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


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


def named_tensors(answer: Any) -> tuple[str | None, Tensor | list[Tensor]]:
    """The output in an answer, and what the library calls it; None where it has no name."""
    if isinstance(answer, Tensor):
        return None, answer
    for name in _NAMES:
        value = answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)
        if isinstance(value, Tensor):
            return name, value
    values = list(answer.values()) if isinstance(answer, Mapping) else answer
    if isinstance(values, Sequence) and values and all(isinstance(value, Tensor) for value in values):
        return None, list(values)
    raise ValueError(
        f"the model answers with {type(answer).__name__}, and which of it to compare is not clear: give "
        "output=function of (model, batch) that returns a tensor, or several"
    )


def objective_for(model: Any, name: str | None, tensors: Any, has_labels: bool) -> str:
    """ "kl" where outputs are logits: by their name, by the model's number of classes, or because there are labels;
    "relative" otherwise."""
    if not isinstance(tensors, Tensor) or tensors.dim() < 2:
        return "relative"
    classes = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    is_head = tensors.dim() == 2 and classes == tensors.shape[-1]
    return "kl" if name == "logits" or (name is None and (is_head or has_labels)) else "relative"
