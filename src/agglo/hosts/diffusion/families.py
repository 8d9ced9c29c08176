"""The families of denoisers that agglo takes apart: where their self-attentions are, and the grids of their tokens.

A family recognises models by the blocks they are made of, so that a library's copies of an architecture under other
names work too. It never imports diffusers: blocks are known by the names of their classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from agglo.hosts.diffusion.rotary import Ids
from agglo.hosts.diffusion.state import Site
from agglo.hosts.swap import UnsupportedModelError

Axes = tuple[int, ...]
Argument = Callable[[str], Any]  # an argument of the model's forward, by its name; None if not given


@dataclass(frozen=True)
class Modules:
    """The modules of a site. role: which mixin its attentions get. cross, mlp: None where the block has none that
    could run with fewer tokens."""

    site: Site
    block: nn.Module
    attentions: tuple[nn.Module, ...]
    role: str
    cross: nn.Module | None = None
    mlp: nn.Module | None = None


class Family(ABC):
    """models: for messages. parts: of a block that can be merged."""

    models: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ("attn",)

    @abstractmethod
    def recognises(self, model: nn.Module) -> bool:
        """Whether a whole model is of this family."""

    @abstractmethod
    def find(self, model: nn.Module) -> Iterator[Modules]:
        """Every self-attention over image tokens."""

    def check(self, model: nn.Module) -> None:  # noqa: B027 most have nothing to check
        """UnsupportedModelError for variants that cannot be reduced."""

    @abstractmethod
    def axes(self, model: nn.Module, argument: Argument) -> Axes | None:
        """Of the input: what `axes_at` needs to know."""

    def axes_at(self, axes: Axes | None, site: Site, n_tokens: int) -> Axes | None:
        """The grid of the tokens of a site: (rows, columns) or (frames, rows, columns)."""
        return _require(axes, n_tokens, site)

    def places(self, model: nn.Module, argument: Argument) -> Any:
        """What rotary positions are computed from, where attention does not get it."""
        return None

    def own_axes(self, model: nn.Module) -> Axes | None:
        """What `axes` would say of an input of the model's own size, where its configuration knows one."""
        side = getattr(model.config, "sample_size", None)  # type: ignore[union-attr]
        if side is None:
            return None
        return (side, side) if isinstance(side, int) else tuple(side)


def named(module: Any, *names: str) -> bool:
    """Whether a module is of a class with one of these names, or of a subclass."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def blocks_of(model: nn.Module, *names: str) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if named(module, *names))


def _site(index: int, name: str, attention: nn.Module, downsample: int = 1) -> Site:
    inner = int(attention.inner_dim)  # type: ignore[arg-type]
    to_q = attention.to_q
    width = int(getattr(to_q, "in_features", inner))  # an adapter's layer has it too
    return Site(index, name, downsample, width, inner, int(attention.heads))  # type: ignore[arg-type]


def _require(axes: Axes | None, n_tokens: int, site: Site) -> Axes | None:
    if axes is not None and _product(axes) != n_tokens:
        raise RuntimeError(
            f"{site.name} got {n_tokens} tokens, where an input of this size was expected to have "
            f"{' x '.join(map(str, axes))}: agglo does not know how this model arranges them"
        )
    return axes


def _product(axes: Axes) -> int:
    product = 1
    for length in axes:
        product *= length
    return product


_OVER_TIME = (
    "TransformerTemporalModel",
    "TransformerSpatioTemporalModel",
    "AnimateDiffTransformer3D",
    "TemporalConvLayer",
)


class UNet(Family):
    """U-Nets: resolutions that halve on the way down and double on the way up.

    Blocks inside a Transformer2DModel, or attentions over feature maps (UNet2DModel, AttnDownBlock2D).
    """

    models = "UNet2DConditionModel, UNet2DModel, ControlNetModel"
    parts = ("attn", "cross", "mlp")

    def recognises(self, model: nn.Module) -> bool:
        return all(hasattr(model, part) for part in ("conv_in", "down_blocks", "mid_block", "time_embedding"))

    def check(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if named(module, *_OVER_TIME):
                raise UnsupportedModelError(
                    f"{type(model).__name__} has layers over time ({name}); of U-Nets agglo reduces {self.models}"
                )

    def find(self, model: nn.Module) -> Iterator[Modules]:
        index = 0
        for prefix, downsample, level in _levels(model):
            for name, module in level.named_modules(prefix=prefix):
                if named(module, "BasicTransformerBlock") and not module.only_cross_attention:
                    attention: Any = module.attn1
                    site = _site(index, name, attention, downsample)
                    cross, mlp = module.attn2, module.ff
                    yield Modules(site, module, (attention,), "tokens", cross, mlp)  # type: ignore[arg-type]
                elif name.split(".")[-2:-1] == ["attentions"] and _is_over_maps(module):
                    yield Modules(_site(index, name, module, downsample), module, (module,), "map")
                else:
                    continue
                index += 1

    def axes(self, model: nn.Module, argument: Argument) -> Axes | None:
        return tuple(argument("sample").shape[-2:])

    def axes_at(self, axes: Axes | None, site: Site, n_tokens: int) -> Axes | None:
        """Odd sizes round up or down, as the model's downsampling pads them."""
        assert axes is not None
        up = tuple(-(-length // site.downsample) for length in axes)
        down = tuple(length // site.downsample for length in axes)
        return _require(down if _product(up) != n_tokens else up, n_tokens, site)


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


def _is_over_maps(module: Any) -> bool:
    """Whether this is an attention that takes a feature map (B, C, H, W), norm and residual included."""
    return named(module, "Attention") and not module.is_cross_attention and module.added_kv_proj_dim is None


class PatchTransformer(Family):
    """Transformers of BasicTransformerBlocks over patches: DiT, PixArt."""

    models = "DiTTransformer2DModel, PixArtTransformer2DModel"
    parts = ("attn", "cross", "mlp")

    def recognises(self, model: nn.Module) -> bool:
        blocks = getattr(model, "transformer_blocks", None)
        return hasattr(model, "pos_embed") and _all_named(blocks, "BasicTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "BasicTransformerBlock")):
            attention: Any = block.attn1
            site = _site(index, name, attention)
            yield Modules(site, block, (attention,), "tokens", block.attn2, block.ff)  # type: ignore[arg-type]

    def axes(self, model: Any, argument: Argument) -> Axes | None:
        height, width = argument("hidden_states").shape[-2:]
        return height // model.config.patch_size, width // model.config.patch_size

    def own_axes(self, model: Any) -> Axes | None:
        axes = super().own_axes(model)
        return None if axes is None else tuple(length // model.config.patch_size for length in axes)


class SD3(PatchTransformer):
    """Stable Diffusion 3: text and image attend jointly, as two streams."""

    models = "SD3Transformer2DModel"
    parts = ("attn", "mlp")

    def recognises(self, model: nn.Module) -> bool:
        blocks = getattr(model, "transformer_blocks", None)
        return hasattr(model, "pos_embed") and _all_named(blocks, "JointTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "JointTransformerBlock")):
            attentions: Any = (block.attn,) if block.attn2 is None else (block.attn, block.attn2)
            yield Modules(_site(index, name, attentions[0]), block, attentions, "joint", None, block.ff)  # type: ignore[arg-type]


class Flux(Family):
    """Flux: blocks of two streams, then blocks in which text and image are one sequence."""

    models = "FluxTransformer2DModel"

    def recognises(self, model: nn.Module) -> bool:
        return _all_named(getattr(model, "transformer_blocks", None), "FluxTransformerBlock") and hasattr(
            model, "single_transformer_blocks"
        )

    def find(self, model: nn.Module) -> Iterator[Modules]:
        blocks = blocks_of(model, "FluxTransformerBlock", "FluxSingleTransformerBlock")
        for index, (name, block) in enumerate(blocks):
            attention: Any = block.attn
            yield Modules(_site(index, name, attention), block, (attention,), "flux")

    def axes(self, model: nn.Module, argument: Argument) -> Axes | None:
        return None if torch.compiler.is_compiling() else grid_of_ids(_ids(argument("img_ids")))

    def places(self, model: Any, argument: Argument) -> Ids:
        return Ids(_ids(argument("txt_ids")), _ids(argument("img_ids")), model.pos_embed)


def _ids(ids: Tensor) -> Tensor:
    return ids[0] if ids.dim() == 3 else ids


def grid_of_ids(ids: Tensor) -> Axes | None:
    """(rows, columns) of ids (N, 3) that count them in the last two columns; None if they form no single grid.

    >>> grid_of_ids(torch.cartesian_prod(torch.tensor([0.0]), torch.arange(2.0), torch.arange(3.0)))
    (2, 3)
    """
    rows, columns = (int(number) + 1 for number in ids[:, -2:].amax(dim=0).tolist())
    if rows * columns != ids.shape[0]:
        return None
    index = torch.arange(ids.shape[0], device=ids.device)
    expected = torch.stack([index // columns, index % columns], dim=-1)
    return (rows, columns) if torch.equal(ids[:, -2:].long(), expected) else None


class Wan(Family):
    """Wan: tokens over frames, rows and columns, rotary positions, text by cross-attention."""

    models = "WanTransformer3DModel"
    parts = ("attn", "cross", "mlp")

    def recognises(self, model: nn.Module) -> bool:
        return _all_named(getattr(model, "blocks", None), "WanTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "WanTransformerBlock")):
            attention: Any = block.attn1
            yield Modules(_site(index, name, attention), block, (attention,), "rotary", block.attn2, block.ffn)  # type: ignore[arg-type]

    def axes(self, model: Any, argument: Argument) -> Axes | None:
        lengths = argument("hidden_states").shape[-3:]
        return tuple(length // patch for length, patch in zip(lengths, model.config.patch_size, strict=True))


class LTX(Family):
    """LTX-Video: as Wan, with tokens in a sequence from the start."""

    models = "LTXVideoTransformer3DModel"
    parts = ("attn", "cross", "mlp")

    def recognises(self, model: nn.Module) -> bool:
        return _all_named(getattr(model, "transformer_blocks", None), "LTXVideoTransformerBlock")

    def find(self, model: nn.Module) -> Iterator[Modules]:
        for index, (name, block) in enumerate(blocks_of(model, "LTXVideoTransformerBlock")):
            attention: Any = block.attn1
            yield Modules(_site(index, name, attention), block, (attention,), "rotary", block.attn2, block.ff)  # type: ignore[arg-type]

    def axes(self, model: nn.Module, argument: Argument) -> Axes | None:
        lengths = argument("num_frames"), argument("height"), argument("width")
        if argument("video_coords") is not None or None in lengths:
            raise RuntimeError(
                "agglo needs the grid of LTX's tokens: call the model with num_frames, height and width, and without "
                "video_coords"
            )
        return lengths


def _all_named(blocks: Any, name: str) -> bool:
    return blocks is not None and len(blocks) > 0 and all(named(block, name) for block in blocks)


FAMILIES: tuple[Family, ...] = (UNet(), SD3(), PatchTransformer(), Flux(), Wan(), LTX())


def family_of(model: nn.Module) -> Family | None:
    """The family of a denoiser; None if it is of none."""
    return next((family for family in FAMILIES if family.recognises(model)), None)


def supported() -> str:
    return ", ".join(family.models for family in FAMILIES)
