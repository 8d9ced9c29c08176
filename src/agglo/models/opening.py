"""Build a model by name, of any library, with the weights of a file, at any image size.

deit_tiny_patch16_224                       timm
hf-hub:timm/NAME, local-dir:PATH            timm's own spellings, of the hub and of a folder
hf:PATH, hf:ORG/NAME                        transformers
torchvision:NAME, torchvision:NAME:TAG      torchvision, TAG being one of its weights
open_clip:NAME, open_clip:NAME:TAG          open_clip, likewise; open_clip:local-dir:PATH, open_clip:hf-hub:ORG/NAME
"""

from __future__ import annotations

from torch import nn

from agglo.hosts.common.swap import Healing
from agglo.models.checkpoints import Checkpoint
from agglo.models.libraries import split_name
from agglo.models.libraries.base import ModelSpec

__all__ = ["ModelSpec", "build"]


def build(spec: ModelSpec, checkpoint: Checkpoint | None = None) -> nn.Module:
    """Build the model that a spec describes, in eval mode on the CPU.

    Args:
        checkpoint: What the spec's file holds, if it was read already.

    Raises:
        ValueError: The message names what is not known or does not fit.
    """
    if spec.pretrained and spec.checkpoint is not None:
        raise ValueError(f"give either pretrained weights or checkpoint={str(spec.checkpoint)!r}, not both")
    library, name = split_name(spec.name)
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
        model = library.build(name, spec, checkpoint).eval()
    except (RuntimeError, OSError, TypeError, KeyError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__  # timm asserts some options without a word
        options = {"num_classes": spec.num_classes, **spec.options}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        raise ValueError(f"model={spec.name!r} cannot be built{given and f' with {given}'}: {reason}") from error
    if checkpoint is not None and checkpoint.healed_for is not None:
        model.agglo_healing = Healing(checkpoint.healed_for)  # type: ignore[assignment]
    return model
