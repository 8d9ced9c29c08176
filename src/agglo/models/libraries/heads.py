"""The classification head of a model, whatever its library calls it."""

from __future__ import annotations

from typing import Any

from torch import nn

from agglo.hosts.registry import unwrapped
from agglo.models.checkpoints import HEADS

_CLASSIFIER = "ForImageClassification"  # in the name of every classifier of transformers


def head_name(model: nn.Module) -> str | None:
    """Return the name of the linear head; None if there is none under a usual name."""
    for name in HEADS:
        try:
            if isinstance(model.get_submodule(name), nn.Linear):
                return name
        except AttributeError:
            continue
    return None


def class_count(model: Any) -> int:
    """Return the number of a model's classes; 0 for one without a head."""
    model = unwrapped(model)
    own = getattr(model, "num_classes", None)
    if isinstance(own, int):
        return own
    if hasattr(model, "config"):
        is_classifier = any(_CLASSIFIER in cls.__name__ for cls in type(model).__mro__)
        return int(model.config.num_labels) if is_classifier else 0
    name = head_name(model)
    return 0 if name is None else int(model.get_submodule(name).out_features)


def set_classes(model: Any, classes: int) -> None:
    """Replace the head of a model by a new one."""
    if hasattr(model, "reset_classifier"):
        model.reset_classifier(classes)
        return
    name = head_name(model)
    if name is None:
        raise ValueError(f"{type(model).__name__} has no head under a usual name ({', '.join(HEADS)}) to be replaced")
    parent, _, last = name.rpartition(".")
    old: Any = model.get_submodule(name)
    new = nn.Linear(old.in_features, classes, bias=old.bias is not None).to(old.weight.device, old.weight.dtype)
    nn.init.trunc_normal_(new.weight, std=0.02)
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    setattr(model.get_submodule(parent), last, new)
    if isinstance(getattr(model, "num_classes", None), int):
        model.num_classes = classes
    if hasattr(model, "config"):
        model.config.num_labels = classes
        model.num_labels = classes
