"""Build a model by name, of any library, with the weights of a file, at any image size.

deit_tiny_patch16_224                       timm
hf-hub:timm/NAME, local-dir:PATH            timm's own spellings, of the hub and of a folder
hf:PATH, hf:ORG/NAME                        transformers
torchvision:NAME, torchvision:NAME:TAG      torchvision, TAG being one of its weights
open_clip:NAME, open_clip:NAME:TAG          open_clip, likewise; open_clip:local-dir:PATH, open_clip:hf-hub:ORG/NAME
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from agglo.models.checkpoints import Checkpoint
from agglo.models.libraries import LIBRARIES, split_name
from agglo.models.libraries.base import ModelSpec

__all__ = ["ACCEPTED", "ModelSpec", "build"]

ACCEPTED = "; ".join(library.accepts for library in LIBRARIES)
_PREFIX = re.compile(r"^([A-Za-z_-]+):")


def build(spec: ModelSpec, checkpoint: Checkpoint | None = None) -> nn.Module:
    """Build the model that a spec describes, in eval mode on the CPU.

    Args:
        spec: The model as a person describes it.
        checkpoint: What the spec's file holds, if it was read already.

    Raises:
        ValueError: The message names what is not known or does not fit.
    """
    if spec.pretrained and spec.checkpoint is not None:
        raise ValueError(f"give either pretrained weights or checkpoint={str(spec.checkpoint)!r}, not both")
    library, name = split_name(spec.name)
    _require_spelling(spec.name)
    if spec.prompts is not None and library.package not in ("transformers", "open_clip"):
        raise ValueError(
            f"model={spec.name!r}: zero-shot is for models of images and texts: hf:PATH of a CLIP or SigLIP, or "
            "open_clip:NAME:TAG"
        )
    if spec.prompts is not None and spec.prompts.class_names is None:
        raise ValueError("zero-shot: class names are needed, one for each class")
    if checkpoint is None and spec.checkpoint is not None:
        checkpoint = Checkpoint.read(spec.checkpoint)
    try:
        return library.build(name, spec, checkpoint).eval()
    except (RuntimeError, OSError, TypeError, KeyError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__  # timm asserts some options without a word
        options = {"num_classes": spec.num_classes, **spec.options}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        raise ValueError(f"model={spec.name!r} cannot be built{given and f' with {given}'}: {reason}") from error


def _require_spelling(name: str) -> None:
    """Raise ValueError for a folder, a file or a name of the hub without a library's prefix, with what to write."""
    if any(name.startswith(prefix) for library in LIBRARIES for prefix in library.prefixes):
        return
    if found := _PREFIX.match(name):
        raise ValueError(f"model={name!r}: {found[1]!r} is not known; accepted: {ACCEPTED}")
    if Path(name).expanduser().is_file():
        raise ValueError(f"model={name!r} is a file: name the model, and give the file as --checkpoint")
    if "/" in name or Path(name).is_dir():
        source = "local-dir" if Path(name).expanduser().is_dir() else "hf-hub"
        raise ValueError(
            f"model={name!r} needs a library in front: hf:{name} (transformers), {source}:{name} (timm) or "
            f"open_clip:{source}:{name}"
        )
