"""Which parameters learn how fast: new modules at the full rate, the backbone slower, frozen at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_ALWAYS_NEW = ("head", "head_dist", "pos_embed", "patch_embed")
_METHOD = "agglo_method"
_FOLLOWS = "norm"  # timm counts the final norm to the last block, MAE to what follows the blocks

Group = dict[str, Any]


def is_new(name: str) -> bool:
    """Whether a parameter belongs to the new modules: head, position and patch embeddings, a method's own.

    >>> is_new("head.weight"), is_new("blocks.3.attn.qkv.weight"), is_new("blocks.agglo_method.mixers.0.queries")
    (True, False, True)
    """
    parts = name.split(".")
    return parts[0] in _ALWAYS_NEW or _METHOD in parts


def parameter_groups(
    model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0, backbone_lr_scale: float = 1.0
) -> list[Group]:
    """Groups for AdamW, each with `lr_scale`, which timm's schedulers multiply rates by (the smallest and warm-up rates
    too), `backbone`, which `freeze_backbone` goes by, and `names` of its parameters.

    Vectors, biases and what the model excludes (position embeddings, class token) do not decay. A rate's factor is
    backbone_lr_scale for the backbone, times layer_decay^(depth + 1 - id), where id is 0 for the embeddings, i + 1 for
    block i and depth + 1 for what follows them, the final norm included, and for what a method learns.
    """
    from timm.optim import param_groups_layer_decay

    undecayed: Any = getattr(model, "no_weight_decay", set)
    # timm tells layers and decay apart; at a layer_decay of 1 all its layers have the same rate.
    layers = param_groups_layer_decay(model, weight_decay, undecayed(), layer_decay=layer_decay)
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
    """Let the backbone stay as it is at the next step: weight decay goes by the rate too. The optimiser's moments go on
    gathering, as in the paper."""
    for group in groups:
        if group["backbone"]:
            group["lr"] = 0.0
