"""Weights from files: read without executing code in them, and loaded only if they fit exactly."""

from __future__ import annotations

import hashlib
import json
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from agglo.config import ReductionConfig

_SHOWN = 400  # letters of a reason
_OF_METHOD = "agglo_method"
HEALED_FOR = "agglo_healed_for"  # in a file's metadata: the config, as JSON, that `agglo.heal` trained the weights for
# What libraries call the layer that gives logits: timm, transformers (and its DeiT), torchvision, convolutional models.
HEADS = ("head", "classifier", "cls_classifier", "heads.head", "fc")
# Names of torchvision's vision transformers, SWAG's among them, and timm's for the same weights.
_TORCHVISION = {
    r"class_token$": "cls_token",
    r"conv_proj\.": "patch_embed.proj.",
    r"heads\.head\.": "head.",
    r"encoder\.pos_embedding$": "pos_embed",
    r"encoder\.ln\.": "norm.",
    r"encoder\.layers\.encoder_layer_(\d+)\.": r"blocks.\1.",
    r"(blocks\.\d+)\.ln_([12])\.": r"\1.norm\2.",
    r"(blocks\.\d+)\.self_attention\.in_proj_": r"\1.attn.qkv.",
    r"(blocks\.\d+)\.self_attention\.out_proj\.": r"\1.attn.proj.",
    r"(blocks\.\d+)\.mlp\.(0|linear_1)\.": r"\1.mlp.fc1.",  # linear_1 and linear_2 before torchvision 0.12
    r"(blocks\.\d+)\.mlp\.(3|linear_2)\.": r"\1.mlp.fc2.",
}


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a file: those of the model, and those of a learned method that was applied to it, if any.

    `healed_for` is the config that `agglo.heal` trained them for; None for all other weights.
    """

    source: str
    model: Mapping[str, Tensor]
    method: Mapping[str, Tensor]
    healed_for: ReductionConfig | None = None

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a file; a vision transformer of torchvision gets timm's names."""
        state = read_checkpoint(path)
        if "conv_proj.weight" in state:
            for theirs, ours in _TORCHVISION.items():
                state = {re.sub(f"^{theirs}", ours, name): value for name, value in state.items()}
        return cls(str(path), *split_method(state), healed_for(path))

    @property
    def head_classes(self) -> int | None:
        """Number of classes of the head; None if there is no head."""
        return next((len(self.model[f"{head}.weight"]) for head in HEADS if f"{head}.weight" in self.model), None)

    def fresh_names(self, model: nn.Module) -> list[str]:
        """Return the parameters of a model that are missing here or have another shape: those are initialised anew."""
        shapes = {name: value.shape for name, value in (*self.model.items(), *self.method.items())}
        return [name for name, parameter in model.named_parameters() if shapes.get(name) != parameter.shape]


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file. Nothing in it is executed: safetensors, or torch.load with weights_only=True.

    A state dict may be what training scripts save: itself, under a key, or with data-parallel names. Averaged weights
    are taken where the file says that they are the better ones, as the study's files do.
    """
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
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no checkpoint fail in as many ways as there are bytes
        raise ValueError(
            f"checkpoint={str(path)!r} cannot be read as plain tensors, and nothing else is accepted: save the state "
            "dict alone"
        ) from error
    if isinstance(content, Mapping) and content.get("ema_best"):
        content = content.get("model_ema")
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        found = f"keys {listed(list(content))}" if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(
            f"checkpoint={str(path)!r} holds no state dict but {found}; accepted: names to tensors, as such or under "
            "'state_dict' or 'model'"
        )
    parallel = bool(content) and all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if parallel else name: value for name, value in content.items()}


def healed_for(path: Path) -> ReductionConfig | None:
    """Return the config that the weights in a file were healed for; None for all other weights."""
    if path.suffix != ".safetensors":
        return None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(HEALED_FOR)
    return None if text is None else ReductionConfig.from_dict(json.loads(text))


def load_exactly(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict whose names and shapes are exactly the model's; ValueError otherwise."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = shorten(str(error), _SHOWN)
        raise ValueError(f"checkpoint={source!r} does not fit {type(model).__name__}: {reason}") from error


def split_method(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a state dict into the weights of the model and those of a learned method."""
    learned = {name: value for name, value in state.items() if _OF_METHOD in name.split(".")}
    return {name: value for name, value in state.items() if name not in learned}, learned


def load_method(model: nn.Module, learned: Mapping[str, Tensor], source: str) -> None:
    """Load the weights of the method applied to a model; a method that does not learn has none."""
    _, own = split_method(model.state_dict())
    if own and not learned:
        raise ValueError(f"this method learns, and {source} holds no weights of it")
    if own and {n: v.shape for n, v in own.items()} != {n: v.shape for n, v in learned.items()}:
        raise ValueError(f"{source} holds weights of another method, or of this one at another keep rate")
    model.load_state_dict({name: learned[name] for name in own}, strict=False)


def listed(names: Iterable[Any]) -> str:
    """Return names in one line, the first ones of many."""
    return shorten(", ".join(map(str, names)), _SHOWN)


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a short hash of the names, shapes, dtypes and values of all weights."""
    content = hashlib.sha256()
    for name, value in state.items():
        content.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()[:16]
