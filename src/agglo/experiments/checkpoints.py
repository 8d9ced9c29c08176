"""Weights from files: read without running any code in them, and loaded only if they fit exactly."""

from __future__ import annotations

import hashlib
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.experiments.torchvision_names import as_timm, is_torchvision

_SHOWN = 6
_NESTED_UNDER = ("state_dict", "model")
_AVERAGE, _AVERAGE_IS_BETTER = "model_ema", "ema_best"
_OF_METHOD = "agglo_method"
# What libraries call the layer that gives logits: timm, transformers (and its DeiT), torchvision, convolutional models.
HEADS = ("head", "classifier", "cls_classifier", "heads.head", "fc")
_BLOCKED = re.compile(r"\bGLOBAL (\S+)")  # as torch names what it refuses to read


@dataclass(frozen=True)
class Checkpoint:
    """What a file of weights holds. It is read once, and this is passed to all who need some of it.

    source: the file, for messages. model: the weights of the model itself.
    method: what the method had learned that was applied to the model; empty if there was none, or it does not learn.
    """

    source: str
    model: Mapping[str, Tensor]
    method: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        state = read_checkpoint(path)
        return cls(str(path), *split_method(as_timm(state) if is_torchvision(state) else state))

    @property
    def head_classes(self) -> int | None:
        """How many classes the head tells apart; None if there is no head."""
        return next((len(self.model[f"{head}.weight"]) for head in HEADS if f"{head}.weight" in self.model), None)

    def fresh_names(self, model: nn.Module) -> list[str]:
        """Parameters of a model that this does not have, or has in another shape: those start afresh."""
        shapes = {name: value.shape for name, value in (*self.model.items(), *self.method.items())}
        return [name for name, parameter in model.named_parameters() if shapes.get(name) != parameter.shape]


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Nothing in it is executed: safetensors, or torch.load with weights_only=True."""
    if not path.is_file():
        raise ValueError(f"checkpoint={str(path)!r} is not a file")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"checkpoint={str(path)!r} cannot be read as safetensors: {error}") from error
    try:
        # DeiT's trainer, and the study's after it, save their arguments beside the weights.
        with torch.serialization.safe_globals([Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no checkpoint fail in as many ways as there are bytes
        raise ValueError(f"checkpoint={str(path)!r} cannot be read as plain tensors: {_why(error)}") from error
    return _state_dict(content, path)


def _why(error: Exception) -> str:
    """What is wrong with a file. Torch's own message would advise to run the code in it."""
    message = str(error)
    if isinstance(error, OSError):
        return message
    if blocked := _BLOCKED.search(message):
        return f"it holds {blocked[1]} besides, which could run code when read; save the state dict alone"
    if "TorchScript" in message:
        return "it is a TorchScript program; save the state dict alone"
    return "it is not a whole file of tensors as torch.save writes them"


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in what training scripts save: itself, under a key, or with data-parallel names. Where the
    averaged weights are there too and are noted as the better ones, as in the study's files, those."""
    if isinstance(content, Mapping) and content.get(_AVERAGE_IS_BETTER):
        if not isinstance(content.get(_AVERAGE), Mapping):
            raise ValueError(f"checkpoint={str(path)!r} says {_AVERAGE_IS_BETTER} but holds no {_AVERAGE}")
        content = content[_AVERAGE]
    for key in _NESTED_UNDER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        found = f"keys {_listed(list(content))}" if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(
            f"checkpoint={str(path)!r} holds no state dict but {found}; accepted: names to tensors, "
            f"as such or under {' or '.join(map(repr, _NESTED_UNDER))}"
        )
    parallel = bool(content) and all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if parallel else name: value for name, value in content.items()}


def load_exactly(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict whose names and shapes are exactly the model's, or raise and leave the model as it was."""
    own = model.state_dict()
    if differences := _differences(own, state):
        raise ValueError(f"checkpoint={source!r} does not fit {type(model).__name__}: {differences}")
    model.load_state_dict(state)


def split_method(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a model itself has, and what the method that was applied to it had learned."""
    learned = {name: value for name, value in state.items() if _OF_METHOD in name.split(".")}
    return {name: value for name, value in state.items() if name not in learned}, learned


def load_method(model: nn.Module, learned: Mapping[str, Tensor], source: str) -> None:
    """Give the method applied to a model the weights it has learned; nothing to do for one that does not learn."""
    _, own = split_method(model.state_dict())
    if own and not learned:
        raise ValueError(f"this method learns, and {source} holds no weights of it")
    if own and (differences := _differences(own, learned)):
        other = "weights of another method, or of this one at another keep rate"
        raise ValueError(f"{source} holds {other}: {differences}")
    model.load_state_dict({name: learned[name] for name in own}, strict=False)


def _differences(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """In words, how a state dict differs from the model's own; empty if names and shapes are the same."""
    problems = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} where the model has {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ],
    }
    return "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(str(name) for name in names[:_SHOWN]) + more


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Names and values of all weights in one short word."""
    content = hashlib.sha256()
    for name, value in state.items():
        content.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()[:16]
