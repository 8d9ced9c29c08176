"""The tensor in a model's output, which libraries wrap in classes, dicts and tuples of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

# What libraries call the output, in the order of preference.
_NAMES = ("logits", "sample", "image_embeds", "pooler_output", "last_hidden_state")


def call(model: Any, inputs: Any) -> Any:
    """Run a model on a batch: a dict is keyword arguments, a tuple positional ones, anything else the only argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def named_tensors(answer: Any) -> tuple[str | None, Tensor | list[Tensor]]:
    """Return the library's name of the output, None where it has none, and its tensor or tensors."""
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


def logits_in(answer: Any) -> Tensor:
    """Return the logits (B, classes) in a classifier's output: the output itself, or its entry "logits"."""
    found = answer.get("logits") if isinstance(answer, Mapping) else getattr(answer, "logits", answer)
    if not isinstance(found, Tensor) or found.dim() != 2:
        what = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(answer).__name__
        raise ValueError(f"logits (B, classes) are needed, and the model answers with {what}: it is no classifier")
    return found


def features_in(answer: Any) -> Tensor:
    """Return the logits or, of a model without a head, the features: the first tensor that has a known name."""
    found = named_tensors(answer)[1]
    return found if isinstance(found, Tensor) else found[0]
