"""Architectures of denoisers: where the self-attentions are, and the grids of their tokens.

Models are recognised by the blocks they are made of, so that copies under other names work too. Nothing here imports
diffusers: blocks are known by the names of their classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from agglo.hosts.common.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.diffusers.mixins import ReducedAttention, ReducedFluxAttention, ReducedMapAttention
from agglo.hosts.diffusers.state import Axes, Site

Arguments = Mapping[str, Any]  # those of a call of the model, by their names
_TEMPORAL_BLOCKS = "temporal_transformer_blocks"
_TEMPORAL_LAYERS = ("TransformerTemporalModel", "TransformerSpatioTemporalModel", "AnimateDiffTransformer3D")


@dataclass(frozen=True)
class Modules:
    """The modules of a site. cross and mlp are None where the block has none that could run with fewer tokens."""

    site: Site
    block: nn.Module  # the attention itself where it takes feature maps
    attentions: tuple[nn.Module, ...]
    mixin: type[ReducedModule]  # of the attentions
    cross: nn.Module | None = None
    mlp: nn.Module | None = None


def named(module: Any, *names: str) -> bool:
    """Return whether a module is of a class with one of these names, or of a subclass."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def own_axes(model: Any) -> Axes | None:
    """Return the axes of an input of the model's own size, where its configuration knows one."""
    side = getattr(model.config, "sample_size", None)
    if side is None:
        return None
    patch = getattr(model.config, "patch_size", 1)
    return tuple(length // patch for length in ((side, side) if isinstance(side, int) else side))


def _site(index: int, name: str, attention: Any, downsample: int = 1) -> Site:
    inner = int(attention.inner_dim)
    width = int(getattr(attention.to_q, "in_features", inner))  # an adapter's layer has it too
    return Site(index, name, downsample, width, inner)


class UNet:
    """U-Nets with blocks inside Transformer2DModels, or with attentions over feature maps (UNet2DModel)."""

    models = "UNet2DConditionModel, UNet2DModel, ControlNetModel"

    def recognises(self, model: nn.Module) -> bool:
        """Return whether a whole model is built like this."""
        return {"conv_in", "down_blocks", "mid_block", "time_embedding"} <= model._modules.keys()

    def find(self, model: nn.Module) -> Iterator[Modules]:
        """Yield every self-attention over image tokens; UnsupportedModelError for variants that cannot be reduced."""
        if any(named(module, *_TEMPORAL_LAYERS) for module in model.modules()):
            raise UnsupportedModelError(f"{type(model).__name__} has layers over time; supported: {self.models}")
        index = 0
        for prefix, downsample, level in _levels(model):
            for name, module in level.named_modules(prefix=prefix):
                block: Any = module
                if named(module, "BasicTransformerBlock") and not block.only_cross_attention:
                    site = _site(index, name, block.attn1, downsample)
                    yield Modules(site, block, (block.attn1,), ReducedAttention, block.attn2, block.ff)
                elif (
                    (name.split(".")[-2:-1] == ["attentions"] and named(module, "Attention"))
                    and not block.is_cross_attention
                    and block.added_kv_proj_dim is None
                    and block.spatial_norm is None
                ):  # over feature maps (B, C, H, W), norm and residual included
                    yield Modules(_site(index, name, module, downsample), module, (module,), ReducedMapAttention)
                else:
                    continue
                index += 1

    def axes(self, model: Any, given: Arguments) -> Axes | None:
        """Return the size of the input, from which `axes_at` derives the grids of tokens."""
        return tuple(given["sample"].shape[-2:])

    def axes_at(self, axes: Axes | None, site: Site, n_tokens: int) -> Axes | None:
        """Return the grid of the tokens of a site; odd sizes are rounded up or down, as downsampling pads them."""
        assert axes is not None
        up = tuple(-(-length // site.downsample) for length in axes)
        down = tuple(length // site.downsample for length in axes)
        return _fitting(down if math.prod(up) != n_tokens else up, site, n_tokens)


def _levels(model: Any) -> Iterator[tuple[str, int, nn.Module]]:
    downsample = 1
    for index, block in enumerate(model.down_blocks):
        yield f"down_blocks.{index}", downsample, block
        downsample *= 2 if getattr(block, "downsamplers", None) else 1
    if model.mid_block is not None:
        yield "mid_block", downsample, model.mid_block
    for index, block in enumerate(getattr(model, "up_blocks", ())):
        yield f"up_blocks.{index}", downsample, block
        downsample //= 2 if getattr(block, "upsamplers", None) else 1


@dataclass(frozen=True)
class Transformer:
    """Diffusion transformers: a list of equal blocks. The methods are those of `UNet`."""

    models: str  # names of the classes, for messages
    classes: tuple[str, ...]  # of blocks, those in the list first
    axes: Callable[[Any, Arguments], Axes | None]
    blocks: str = "transformer_blocks"  # the name of the list
    modules: tuple[str, ...] = ()  # others that the model has
    mixin: type[ReducedModule] = ReducedAttention
    attentions: tuple[str, ...] = ("attn1",)
    cross: str | None = "attn2"
    mlp: str | None = "ff"

    def recognises(self, model: nn.Module) -> bool:
        own = model._modules  # the model's, not what a wrapper around it seems to have
        blocks: Any = own.get(self.blocks)
        if not isinstance(blocks, nn.ModuleList) or not own.keys() >= set(self.modules) or _TEMPORAL_BLOCKS in own:
            return False
        return len(blocks) > 0 and all(named(block, self.classes[0]) for block in blocks)

    def find(self, model: nn.Module) -> Iterator[Modules]:
        found = [(name, module) for name, module in model.named_modules() if named(module, *self.classes)]
        for index, (name, block) in enumerate(found):
            present = [getattr(block, each) for each in self.attentions]
            attentions = tuple(each for each in present if each is not None)
            cross, mlp = (None if part is None else getattr(block, part) for part in (self.cross, self.mlp))
            yield Modules(_site(index, name, attentions[0]), block, attentions, self.mixin, cross, mlp)

    def axes_at(self, axes: Axes | None, site: Site, n_tokens: int) -> Axes | None:
        return _fitting(axes, site, n_tokens)


def _fitting(axes: Axes | None, site: Site, n_tokens: int) -> Axes | None:
    """Return a grid; RuntimeError if the tokens of a site are not as many."""
    if axes is not None and math.prod(axes) != n_tokens:
        raise RuntimeError(f"{site.name} got {n_tokens} tokens, not {' x '.join(map(str, axes))} as expected")
    return axes


def _patches(model: Any, given: Arguments) -> Axes:
    patch = model.config.patch_size
    sides = (patch, patch) if isinstance(patch, int) else patch
    lengths = given["hidden_states"].shape[-len(sides) :]
    return tuple(length // side for length, side in zip(lengths, sides, strict=True))


def _points_of_ids(model: Any, given: Arguments) -> Axes | None:
    return None if torch.compiler.is_compiling() else grid_of_ids(given["img_ids"])


def grid_of_ids(ids: Tensor) -> Axes | None:
    """Return (rows, columns) of ids ([1,] N, 3) whose last two columns count them; None if they form no single grid.

    >>> grid_of_ids(torch.cartesian_prod(torch.tensor([0.0]), torch.arange(2.0), torch.arange(3.0)))
    (2, 3)
    """
    ids = ids[0] if ids.dim() == 3 else ids
    rows, columns = (int(number) + 1 for number in ids[:, -2:].amax(dim=0).tolist())
    if rows * columns != ids.shape[0]:
        return None
    expected = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(ids)
    return (rows, columns) if torch.equal(ids[:, -2:], expected) else None


def _given_lengths(model: Any, given: Arguments) -> Axes:
    lengths: Any = tuple(given.get(name) for name in ("num_frames", "height", "width"))
    if given.get("video_coords") is not None or None in lengths:
        raise RuntimeError("agglo needs LTX's grid: give num_frames, height and width, and no video_coords")
    return cast(Axes, lengths)


Architecture = UNet | Transformer
_FLUX = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
ARCHITECTURES: tuple[Architecture, ...] = (
    UNet(),
    # Text and image attend jointly, as two streams; some blocks have a second attention.
    Transformer(
        "SD3Transformer2DModel", ("JointTransformerBlock",), _patches, modules=("pos_embed",),
        attentions=("attn", "attn2"), cross=None,
    ),
    Transformer(
        "DiTTransformer2DModel, PixArtTransformer2DModel", ("BasicTransformerBlock",), _patches, modules=("pos_embed",)
    ),
    # Blocks of two streams, then blocks in which text and image are one sequence.
    Transformer(
        "FluxTransformer2DModel", _FLUX, _points_of_ids, modules=("single_transformer_blocks",),
        mixin=ReducedFluxAttention, attentions=("attn",), cross=None, mlp=None,
    ),
    # Tokens over frames, rows and columns, rotary positions, text by cross-attention.
    Transformer("WanTransformer3DModel", ("WanTransformerBlock",), _patches, blocks="blocks", mlp="ffn"),
    Transformer("LTXVideoTransformer3DModel", ("LTXVideoTransformerBlock",), _given_lengths),
)  # fmt: skip


def architecture_of(model: nn.Module) -> Architecture | None:
    return next((architecture for architecture in ARCHITECTURES if architecture.recognises(model)), None)
