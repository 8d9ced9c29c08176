"""transformers' vision towers, recognised by their structure; docs/hosts.md lists the families that are tested.

Each is reduced where its loop over layers lies (`loop.py`), so classifiers, backbones, contrastive models and VLMs that
hold one work as they are. Hidden states are full-length. The chosen attention implementation runs the layers before the
first reduction; after it proportional attention does.

A tower holds a patch embedding, and a list of layers in itself or in a child. Tokens other than patches are parameters
of the embedding; one that has a parameter agglo does not know is refused rather than guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, ClassVar, cast

from torch import nn

from agglo.hosts.common.base import Host, Layout, matrix_entries, require_no_bypass, require_own
from agglo.hosts.common.layers import Structure, require_structure
from agglo.hosts.common.probe import prove
from agglo.hosts.common.swap import Head, ReducedModule, Setting, UnsupportedModelError
from agglo.hosts.transformers.loop import GridForwardingTower, ReducedLoop
from agglo.hosts.transformers.parts import has_tiles, loop_of, pair, probe_cases, tile_lengths
from agglo.methods import Grid

PACKAGES = ("transformers", "transformers_modules")
_EMBEDDINGS = ("embeddings", "patch_embed", "patch_embedding", "patch_conv")
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
_FRONT = ("cls_token", "class_embedding", "class_token", "distillation_token", "register_tokens", "cls_register_token")
_BACK = ("detection_tokens",)
_NOT_TOKENS = ("mask_token", "class_pos_emb", "position", "pos_embed", "type_embeddings", "time_embeddings")
_NO_TOKENS = ("weight", "bias")  # of a convolution that is itself the embedding
_NOMINAL_SIDE = 16  # patches, for towers that take every size and name none
# Classifiers that read no patch, and how many tokens in front they read.
_READERS = {"ViTForImageClassification": 1, "DeiTForImageClassification": 1, "DeiTForImageClassificationWithTeacher": 2}
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
        packages = {cls.__module__.split(".")[0] for cls in type(module).__mro__}
        found = None if packages.isdisjoint(PACKAGES) else loop_of(module)
        if found is None or embeddings_of(module) is None:
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
        for token, value in (*tower.embeddings._parameters.items(), *module._parameters.items()):
            if value is None or token in _NO_TOKENS or any(each in token for each in _FRONT + _BACK + _NOT_TOKENS):
                continue
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
        tower = tower_of(module)
        layers = list(getattr(tower.loop, tower.layers))
        convolutions = [part for part in tower.embeddings.modules() if isinstance(part, _CONVOLUTIONS)]
        linears = _patch_linears(tower.embeddings)
        embedded = int(tower.patches / (1 - getattr(module.config, "mask_ratio", 0.0)))
        return Layout(
            depth=len(layers),
            prefix=tower.prefix + tower.suffix,
            patches=tower.patches,
            embedding_weights=matrix_entries(*(convolutions[-1:] or linears[:1])) * embedded // tower.patches,
            head_madds=_head_madds(module, tower.patches),
            grid=tower.grid,
            suffix=tower.suffix,
            **Structure.of(layers[0]).sizes(layers[0]),
        )

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


@dataclass(frozen=True)
class Tower:
    """A vision tower, and where its parts are."""

    loop: Any  # the module that loops over its layers
    layers: str  # their name in it
    embeddings: Any
    prefix: int  # tokens in front that are never merged
    suffix: int  # those at the end
    grid: Grid | None  # (rows, columns) of the patches at the tower's own input size, if they are in such an order
    patches: int  # how many there are


def embeddings_of(module: nn.Module) -> nn.Module | None:
    """Return a child with a convolution, or a linear layer named after patches, and without a vocabulary, if any."""
    for name in _EMBEDDINGS:
        child = module._modules.get(name)
        if child is None or any("word_embeddings" in inner or "text" in inner for inner, _ in child.named_modules()):
            continue
        if any(isinstance(part, _CONVOLUTIONS) for part in child.modules()) or _patch_linears(child):
            return child
    return None


def tower_of(module: Any) -> Tower:
    """Return the parts of a module that is built like a tower."""
    found, embeddings = loop_of(module), embeddings_of(module)
    assert found is not None
    assert embeddings is not None
    owned: list[tuple[str, Any]] = [*embeddings._parameters.items(), *module._parameters.items()]
    prefix, suffix = (
        sum(prod(value.shape[:-1]) for name, value in owned if name in names and value is not None)  # ([1,] [n,] C)
        for names in (_FRONT, _BACK)
    )
    grid, patches = _patches(module.config)
    if has_tiles(found[0]):
        patches, kept = tile_lengths(module.config)
        n_tiles = module.config.max_num_tiles
        return Tower(*found, embeddings, kept * n_tiles, 0, None, patches * n_tiles)
    return Tower(*found, embeddings, prefix, suffix, grid, patches)


def _patch_linears(module: nn.Module) -> list[nn.Linear]:
    parts = [("patch", module), *module.named_modules()]
    return [part for name, part in parts if isinstance(part, nn.Linear) and "patch" in name]


def _patches(config: Any) -> tuple[Grid | None, int]:
    """Return (rows, columns) where patches are in such an order, and their number at the tower's own input size."""
    size = next((getattr(config, name) for name in ("image_size", "crop_size") if hasattr(config, name)), None)
    if hasattr(config, "num_mel_bins"):  # audio, as an image of frequencies and times
        mel, length, side = config.num_mel_bins, config.max_length, config.patch_size
        grid = (mel - side) // config.frequency_stride + 1, (length - side) // config.time_stride + 1
        return grid, grid[0] * grid[1]
    frames = next((getattr(config, name) for name in ("num_frames", "frames_per_clip") if hasattr(config, name)), None)
    tubelet = getattr(config, "tubelet_size", None)
    if size is None:
        side = isqrt(getattr(config, "num_patches", None) or _NOMINAL_SIDE**2)
        return (side, side), side * side
    patch = getattr(config, "patch_size", None)
    if isinstance(tubelet, (tuple, list)):
        tubelet, *patch = tubelet
    (height, width), (tall, wide) = pair(size), pair(patch)
    rows, columns = height // tall, width // wide
    if frames is not None and (tubelet is not None or hasattr(config, "attention_type")):
        return None, frames // (tubelet or 1) * rows * columns
    if (ratio := getattr(config, "mask_ratio", None)) is not None:  # only some are left, in no order
        return None, int(rows * columns * (1 - ratio))
    return (rows, columns), rows * columns


def _head_madds(module: Any, patches: int) -> int:
    """Return the multiply-adds of the tower's pooler. One that attends projects every patch to a key and a value."""
    head, width = getattr(module, "head", None), getattr(module.config, "hidden_size", 0)
    if head is None:
        return matrix_entries(getattr(module, "pooler", None))
    return matrix_entries(head) + (patches - 1) * 2 * width**2
