"""Which parameters decay: as in the released training, where their names decide."""

from __future__ import annotations

from typing import Any

from torch import nn

from agglo.detection.model.spatial_prior import SpatialPrior

_NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)
_EMBEDDINGS = ("pos_embed", "level_embedding")


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for AdamW, each with the `names` of its parameters: those that decay, and those that do not.

    Position and level embeddings, everything called bias and the scales of norms do not. The released rule goes by
    names, and in the convolutional prior norms have none ("stem.1.weight"), nor have the injectors' gamma: these do
    decay there, and so they do here.
    """
    modules = dict(model.named_modules())
    in_prior = {
        id(part) for module in modules.values() if isinstance(module, SpatialPrior) for part in module.modules()
    }
    groups: list[dict[str, Any]] = [{"weight_decay": decay, "params": [], "names": []} for decay in (weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        norm = isinstance(modules[owner], _NORMS) and id(modules[owner]) not in in_prior
        free = norm or "bias" in last or last in _EMBEDDINGS
        groups[free]["params"].append(parameter)
        groups[free]["names"].append(name)
    return groups
