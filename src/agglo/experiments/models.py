"""A timm model by name, with the weights of a file, at any image size."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from agglo.experiments.checkpoints import Checkpoint, load_exactly

_ENDS = ("head.", "norm.", "fc_norm.")


@dataclass(frozen=True)
class ModelSpec:
    """A model as a person describes it.

    name: as timm knows it.
    checkpoint: a .safetensors file or one of torch.save; its names and shapes must be exactly the model's. What a
        method learned may be there too and is left out (`checkpoints.load_method`).
    pretrained: take timm's published weights instead (downloads them).
    image_size: (height, width); None is the model's own. Position embeddings are resampled after loading.
    num_classes: of the head; None is the checkpoint's, or else the model's own.
    options: further arguments of the model, by timm's names (drop_path_rate, global_pool, ...).
    new_head: let the checkpoint have another head, final norm or none at all: those start afresh.
    """

    name: str
    checkpoint: Path | None = None
    pretrained: bool = False
    image_size: tuple[int, int] | None = None
    num_classes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    new_head: bool = False

    @property
    def has_random_weights(self) -> bool:
        return self.checkpoint is None and not self.pretrained


def build(spec: ModelSpec, checkpoint: Checkpoint | None = None) -> nn.Module:
    """The model a spec describes, in eval mode on the CPU; ValueError names what does not fit.

    checkpoint: what the spec's file holds, if it was read already.
    """
    import timm

    import agglo.embedded.classifier  # noqa: F401 from here on timm knows the model that comes with agglo

    if not timm.is_model(spec.name):
        close = difflib.get_close_matches(spec.name, timm.list_models(), n=3)
        hint = f"; close to it: {', '.join(close)}" if close else "; timm.list_models() lists them"
        raise ValueError(f"model={spec.name!r} is not known to timm{hint}")
    if spec.pretrained and spec.checkpoint is not None:
        raise ValueError(f"give either pretrained weights or checkpoint={str(spec.checkpoint)!r}, not both")
    if checkpoint is None and spec.checkpoint is not None:
        checkpoint = Checkpoint.read(spec.checkpoint)
    state = None if checkpoint is None else checkpoint.model
    options = {} if state is None or spec.new_head else _options_of(state)
    if spec.num_classes is not None:
        options["num_classes"] = spec.num_classes
    options.update(spec.options)
    try:
        model: nn.Module = timm.create_model(spec.name, pretrained=spec.pretrained, **options)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model={spec.name!r} cannot be built{given and f' with {given}'}: {reason}") from error
    if state is not None:
        load_exactly(model, _with_own_head(model, state) if spec.new_head else state, str(spec.checkpoint))
    if spec.image_size is not None:
        _resize(model, spec.image_size)
    return model.eval()


def _options_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The options that a vision transformer with these weights has: its classes, and whether patches are averaged."""
    options: dict[str, Any] = {}
    if "head.weight" in state and state["head.weight"].ndim == 2:
        options["num_classes"] = len(state["head.weight"])
    if "fc_norm.weight" in state and "norm.weight" not in state:
        options["global_pool"] = "avg"
    return options


def _with_own_head(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict, except that the model keeps its own head and final norm where the state dict has none (MAE's
    encoder), or has them in another shape (other classes) or under another name (another pooling)."""
    own = model.state_dict()
    ends = {name for name in (*own, *state) if name.startswith(_ENDS)}
    differs = {name for name in ends if name not in own or name not in state or own[name].shape != state[name].shape}
    kept = {name: value for name, value in state.items() if name not in differs}
    return {**kept, **{name: own[name] for name in differs if name in own}}


def _resize(model: Any, image_size: tuple[int, int]) -> None:
    if not hasattr(model, "set_input_size"):
        raise ValueError(f"{type(model).__name__} has a fixed image size; image_size={image_size} cannot be set")
    patch = model.patch_embed.patch_size
    if any(side < 1 or side % p for side, p in zip(image_size, patch, strict=True)):
        raise ValueError(f"image_size={image_size} must be multiples of the patch size {tuple(patch)}")
    model.set_input_size(img_size=image_size)
