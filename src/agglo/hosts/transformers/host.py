"""transformers' vision towers, recognised by their structure; docs/hosts.md lists the families that are tested.

Each is reduced where its loop over layers lies (`loop.py`), so classifiers, backbones, contrastive models and VLMs that
hold one work as they are. Hidden states are full-length. The chosen attention implementation runs the layers before the
first reduction; after it proportional attention does.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import nn

from agglo.hosts.common.base import Host, Layout, require_no_bypass, require_own
from agglo.hosts.common.layers import Structure, require_structure
from agglo.hosts.common.probe import prove
from agglo.hosts.common.swap import Head, ReducedModule, Setting, UnsupportedModelError
from agglo.hosts.transformers.loop import GridForwardingTower, ReducedLoop
from agglo.hosts.transformers.parts import probe_cases
from agglo.hosts.transformers.tower import is_tower, loop_of, tower_of, unknown_tokens

# Classifiers that read no patch, and how many tokens in front they read.
_READERS = {
    "ViTForImageClassification": 1,
    "DeiTForImageClassification": 1,
    "DeiTForImageClassificationWithTeacher": 2,
}
# What a layer has, and why it is then not reduced.
_REFUSED = {
    "temporal_attention": "attends between frames at every position alone, where merged tokens are at no position",
    "window_size": "attends within windows of the grid, in which merged tokens have no position",
}


class TransformersViT(Host):
    """transformers' vision towers."""

    model_classes: ClassVar[tuple[str, ...]] = ("transformers' vision towers",)
    may_stay_merged: ClassVar[bool] = True

    def recognises(self, module: nn.Module) -> bool:
        found = loop_of(module) if is_tower(module) else None
        if found is None:
            return False
        try:
            Structure.of(getattr(*found)[0])
        except UnsupportedModelError:
            return False
        return True

    def check(self, module: nn.Module) -> None:
        name = type(module).__name__
        try:
            tower = tower_of(module)
        except (AttributeError, TypeError) as error:
            raise UnsupportedModelError(
                f"agglo cannot tell how many patches {name} makes ({error}); docs/hosts.md says how to write a host"
            ) from error
        for part in (module, tower.loop):
            require_no_bypass(part, ("forward",), "transformers")
        token = unknown_tokens(module)
        if token is not None:
            raise UnsupportedModelError(
                f"{name} embeds images with a parameter {token!r} that agglo does not know: it may be tokens that must "
                "not be merged; see docs/hosts.md"
            )
        layers = getattr(tower.loop, tower.layers)
        for layer in layers:
            for attribute, reason in _REFUSED.items():
                if hasattr(layer, attribute):
                    raise UnsupportedModelError(f"{name} is built from {type(layer).__name__}, which {reason}")
        require_structure(module, layers)

    def prove(self, module: nn.Module) -> None:
        tower = tower_of(module)
        prove(getattr(tower.loop, tower.layers), type(module).__name__, probe_cases)

    def layout(self, module: Any) -> Layout:
        return tower_of(module).layout()

    def loop(self, module: nn.Module) -> nn.Module:
        return cast(nn.Module, tower_of(module).loop)

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return ReducedLoop

    def grid_forwarding(self, module: nn.Module) -> tuple[type[ReducedModule], Setting] | None:
        tower = tower_of(module)
        return None if tower.loop is module or tower.grid is None else (GridForwardingTower, Setting())

    def head(self, model: nn.Module, module: nn.Module) -> Head:
        owners = [
            (owner, name) for owner in model.modules() for name, child in owner.named_children() if child is module
        ]
        for owner, name in owners:
            known = [cls.__name__ for cls in type(owner).__mro__ if cls.__name__ in _READERS]
            if known and self.loop(module) is module:
                require_own(owner, ("forward",), "transformers")
                return Head(_READERS[known[0]], reader=owner, loop=name, watched=(f"{name}.layernorm",))
        holder = f"in {type(owners[0][0]).__name__}" if owners else "by itself"
        raise UnsupportedModelError(
            f"last_block='class_token' needs a head that reads no patches: {', '.join(_READERS)}. "
            f"{type(module).__name__} {holder} gives its patches to whoever calls it"
        )
