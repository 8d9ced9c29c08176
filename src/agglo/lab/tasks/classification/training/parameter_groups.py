"""Parameter groups: new modules at the full learning rate, the backbone slower, frozen at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_METHOD = "agglo_method"
# Names of the parts, at any depth of a parameter's name, in timm, transformers, torchvision and open_clip.
_POSITIONS = {"pos_embed", "position_embeddings", "position_embedding", "pos_embedding", "positional_embedding"}
_TOKENS = {"cls_token", "class_token", "class_embedding", "distillation_token", "register_tokens"}
_PATCHES = {"patch_embed", "patch_embeddings", "patch_embedding", "conv_proj", "conv1"}
_HEADS = {"head", "head_dist", "heads", "classifier", "cls_classifier", "distillation_classifier"}
_NEW = _POSITIONS | _PATCHES | _HEADS | {_METHOD}

Group = dict[str, Any]


def is_new(name: str) -> bool:
    """Return whether a parameter belongs to the new modules: head, position and patch embeddings, a method's own.

    >>> is_new("head.weight"), is_new("blocks.3.attn.qkv.weight"), is_new("blocks.agglo_method.mixers.0.queries")
    (True, False, True)
    """
    return not _NEW.isdisjoint(name.split("."))


def parameter_groups(
    model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0, backbone_lr_scale: float = 1.0
) -> list[Group]:
    """Return groups for AdamW, each with `lr_scale`, `backbone`, which `freeze_backbone` reads, and `names`.

    timm's schedulers multiply all rates by `lr_scale`, the smallest and warm-up rates too.

    Vectors, biases and what the model excludes (position embeddings, class token) do not decay. A rate's factor is
    backbone_lr_scale for the backbone, times layer_decay^(depth + 1 - id), where id is 0 for the embeddings, i + 1 for
    block i and depth + 1 for what follows them, the final norm included, and for what a method learns.
    """
    from timm.optim import param_groups_layer_decay

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    undecayed: Any = [name for name in names.values() if not (_POSITIONS | _TOKENS).isdisjoint(name.split("."))]
    if hasattr(model, "group_matcher"):  # of timm
        undecayed = getattr(model, "no_weight_decay", set)()
    elif layer_decay != 1:
        raise ValueError(f"layer_decay={layer_decay:g} needs a model of timm, not {type(model).__name__}")
    groups: dict[tuple[float, float, bool], Group] = {}
    for layer in param_groups_layer_decay(model, weight_decay, undecayed, layer_decay=layer_decay):
        for parameter in layer["params"]:
            name = names[id(parameter)]
            # timm counts the final norm to the last block, MAE to what follows the blocks.
            follows = name.startswith("norm.") or _METHOD in name.split(".")
            backbone = not is_new(name)
            scale = (1.0 if follows else layer["lr_scale"]) * (backbone_lr_scale if backbone else 1.0)
            key = (scale, layer["weight_decay"], backbone)
            empty: Group = {"lr_scale": scale, "weight_decay": key[1], "backbone": backbone, "params": [], "names": []}
            group = groups.setdefault(key, empty)
            group["params"].append(parameter)
            group["names"].append(name)
    return list(groups.values())


def freeze_backbone(groups: Sequence[Group]) -> None:
    """Set the learning rate of the backbone to 0 for the next step, and so its weight decay.

    The optimiser's moments are still updated, as in the paper.
    """
    for group in groups:
        if group["backbone"]:
            group["lr"] = 0.0
