"""A model by name, of any library, with the weights of a file, at any image size.

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

from agglo.experiments.checkpoints import Checkpoint
from agglo.experiments.libraries import LIBRARIES, split_name
from agglo.experiments.libraries.base import ModelSpec

__all__ = ["ACCEPTED", "ModelSpec", "build"]

ACCEPTED = "; ".join(library.accepts for library in LIBRARIES)
_PREFIX = re.compile(r"^([A-Za-z_-]+):")


def build(spec: ModelSpec, checkpoint: Checkpoint | None = None) -> nn.Module:
    """The model a spec describes, in eval mode on the CPU; ValueError names what does not fit.

    checkpoint: what the spec's file holds, if it was read already.
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
    if checkpoint is None and spec.checkpoint is not None:
        checkpoint = Checkpoint.read(spec.checkpoint)
    try:
        return library.build(name, spec, checkpoint).eval()
    except (RuntimeError, OSError, TypeError, KeyError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model={spec.name!r} cannot be built: {reason}") from error


def _require_spelling(name: str) -> None:
    """ValueError for a name of another library, or a folder, without what goes in front: with the right spelling, and
    never with another model."""
    if any(name.startswith(prefix) for library in LIBRARIES for prefix in library.prefixes):
        return
    if found := _PREFIX.match(name):
        raise ValueError(f"model={name!r}: {found[1]!r} is not known; accepted: {ACCEPTED}")
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"model={name!r} is a folder: {_of_folder(path, name)}")
    if path.is_file():
        raise ValueError(f"model={name!r} is a file: name the model, and give the file as --checkpoint")
    if "/" in name:
        raise ValueError(
            f"model={name!r} needs a library in front: hf:{name} (transformers), hf-hub:{name} (timm) or "
            f"open_clip:hf-hub:{name}"
        )
    if elsewhere := _elsewhere(name):
        raise ValueError(f"model={name!r} is not known to timm: write {elsewhere}")


def _of_folder(path: Path, name: str) -> str:
    import json

    if (path / "open_clip_config.json").is_file():
        return f"write open_clip:local-dir:{name}"
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "it holds no config.json; folders of transformers are hf:PATH, of timm local-dir:PATH"
    is_timm = "architecture" in config
    return f"write {'local-dir' if is_timm else 'hf'}:{name}"


def _elsewhere(name: str) -> str | None:
    """The spelling of a plain name that another library has and timm does not, if any is installed that has it."""
    from importlib.util import find_spec

    import timm

    import agglo.embedded.classifier  # noqa: F401

    if timm.is_model(name):
        return None
    if find_spec("torchvision") is not None:
        from torchvision import models

        if name in models.list_models(module=models):
            return f"torchvision:{name}"
    if find_spec("open_clip") is not None:
        import open_clip

        if name in open_clip.list_models():
            return f"open_clip:{name}"
    return None
