"""U-Nets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from agglo.hosts.diffusion.family import Argument, Axes, Family, Modules, named, product, require_product, site_of
from agglo.hosts.diffusion.state import Site
from agglo.hosts.swap import UnsupportedModelError

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

    def recognises(self, model: nn.Module) -> bool:
        return {"conv_in", "down_blocks", "mid_block", "time_embedding"} <= model._modules.keys()

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
                    site = site_of(index, name, attention, downsample)
                    cross, mlp = module.attn2, module.ff
                    yield Modules(site, module, (attention,), "tokens", cross, mlp)
                elif name.split(".")[-2:-1] == ["attentions"] and _is_over_maps(module):
                    yield Modules(site_of(index, name, module, downsample), module, (module,), "map")
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
        return require_product(down if product(up) != n_tokens else up, n_tokens, site)


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
    alone = named(module, "Attention") and not module.is_cross_attention and module.added_kv_proj_dim is None
    return alone and module.spatial_norm is None
