"""Parameter groups: new modules at the full learning rate, the backbone slower, frozen at first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

_ALWAYS_NEW = ("head", "head_dist", "pos_embed", "patch_embed")
_METHOD = "agglo_method"
_FOLLOWS = "norm"  # timm counts the final norm to the last block, MAE to what follows the blocks

# The same parts in transformers, torchvision and open_clip, at any depth of a name.
_POSITIONS = frozenset({"position_embeddings", "position_embedding", "pos_embedding", "positional_embedding"})
_TOKENS = frozenset({"cls_token", "class_token", "class_embedding", "distillation_token", "register_tokens"})
_PATCHES = frozenset({"patch_embeddings", "patch_embedding", "conv_proj", "conv1"})
_HEADS = frozenset({"classifier", "cls_classifier", "distillation_classifier", "heads"})
_BLOCK = re.compile(r"(?:^|\.)(?:layers?|blocks|resblocks)\.(?:encoder_layer_)?(\d+)\.")
_PROJECTION = ".proj"  # of open_clip's towers: the one parameter that follows the blocks and is listed before them

Group = dict[str, Any]


def is_new(name: str) -> bool:
    """Return whether a parameter belongs to the new modules: head, position and patch embeddings, a method's own.

    >>> is_new("head.weight"), is_new("blocks.3.attn.qkv.weight"), is_new("blocks.agglo_method.mixers.0.queries")
    (True, False, True)
    """
    parts = name.split(".")
    return parts[0] in _ALWAYS_NEW or _METHOD in parts or not (_POSITIONS | _PATCHES | _HEADS).isdisjoint(parts)


def parameter_groups(
    model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0, backbone_lr_scale: float = 1.0
) -> list[Group]:
    """Return groups for AdamW, each with `lr_scale`, `backbone`, which `freeze_backbone` reads, and `names`.

    timm's schedulers multiply all rates by `lr_scale`, the smallest and warm-up rates too.

    Vectors, biases and what the model excludes (position embeddings, class token) do not decay. A rate's factor is
    backbone_lr_scale for the backbone, times layer_decay^(depth + 1 - id), where id is 0 for the embeddings, i + 1 for
    block i and depth + 1 for what follows them, the final norm included, and for what a method learns.
    """
    if hasattr(model, "group_matcher"):  # of timm
        from timm.optim import param_groups_layer_decay

        undecayed: Any = getattr(model, "no_weight_decay", set)
        layers = param_groups_layer_decay(model, weight_decay, undecayed(), layer_decay=layer_decay)
    else:
        layers = _layers_by_name(model, weight_decay, layer_decay)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: dict[tuple[float, float, bool], Group] = {}
    for layer in layers:
        for parameter in layer["params"]:
            name = names[id(parameter)]
            parts = name.split(".")
            backbone = not is_new(name)
            scale = 1.0 if parts[0] == _FOLLOWS or _METHOD in parts else layer["lr_scale"]
            scale *= backbone_lr_scale if backbone else 1.0
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


def _layers_by_name(model: nn.Module, weight_decay: float, layer_decay: float) -> list[Group]:
    """Return what timm's `param_groups_layer_decay` does, for models of other libraries, by the names of parameters.

    What is listed before the first block belongs to the embeddings, what is listed after the last one follows them.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    numbers = [int(found[1]) for name, _ in trained if (found := _BLOCK.search(name)) is not None]
    if not numbers and layer_decay != 1:
        raise ValueError(f"layer_decay={layer_decay:g}: {type(model).__name__} has no blocks under a usual name")
    depth, begun = max(numbers, default=-1) + 1, False
    groups = []
    for name, parameter in trained:
        block = _BLOCK.search(name)
        begun = begun or block is not None
        layer = int(block[1]) + 1 if block is not None else depth + 1 if begun or name.endswith(_PROJECTION) else 0
        undecayed = parameter.ndim <= 1 or not (_POSITIONS | _TOKENS).isdisjoint(name.split("."))
        scale = layer_decay ** (depth + 1 - layer)
        groups.append({"lr_scale": scale, "weight_decay": 0.0 if undecayed else weight_decay, "params": [parameter]})
    return groups
