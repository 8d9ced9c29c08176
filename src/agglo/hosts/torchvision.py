"""torchvision's VisionTransformer: ViT B/16, B/32, L/16, L/32, H/14, with the SWAG weights too.

Its Encoder holds the loop over blocks, adds the position embedding before and normalises after.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.common.base import Host, Layout, matrix_entries, require_no_bypass, require_own
from agglo.hosts.common.blocks import Parts
from agglo.hosts.common.layers import LayerParts, Structure, require_structure
from agglo.hosts.common.loop import BlockLoop, Given
from agglo.hosts.common.probe import plain_case, prove
from agglo.hosts.common.readers import Head
from agglo.hosts.common.swap import PassSetup, ReducedModule, begins_pass

_PREFIX = 1  # the class token, always there


class _EncoderLoop(BlockLoop):
    blocks_name = "layers"

    def parts(self, block: nn.Module, given: Given) -> Parts:
        return LayerParts(self.structure(block), given)


class _ReducedEncoder(ReducedModule):
    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Tensor:
        return cast(Tensor, _EncoderLoop(self, setup, lazy=True).call("forward", *args, **kwargs))


class TorchvisionViT(Host):
    """torchvision's plain vision transformer."""

    model_classes: ClassVar[tuple[str, ...]] = ("torchvision.VisionTransformer",)

    def check(self, module: Any) -> None:
        require_no_bypass(module.encoder, ("forward",), "torchvision")
        require_structure(module, module.encoder.layers)

    def prove(self, module: Any) -> None:
        layers = module.encoder.layers
        prove(layers, type(module).__name__, lambda block: plain_case(block, LayerParts(Structure.of(block), {})))

    def loop(self, module: Any) -> nn.Module:
        return cast(nn.Module, module.encoder)

    def layout(self, module: Any) -> Layout:
        block = module.encoder.layers[0]
        return Layout(
            depth=len(module.encoder.layers),
            prefix=_PREFIX,
            patches=module.encoder.pos_embedding.shape[1] - _PREFIX,
            embedding_weights=_stem_madds_per_patch(module),
            head_madds=matrix_entries(module.heads),
            grid=(module.image_size // module.patch_size,) * 2,
            **Structure.of(block).sizes(block),
        )

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return _ReducedEncoder

    def head(self, model: nn.Module, module: nn.Module) -> Head:
        require_own(module, ("forward",), "torchvision")
        return Head(reads=1, reader=module, loop="encoder", watched=("encoder.ln",))


def _stem_madds_per_patch(module: Any) -> int:
    """One convolution, or a stem of several that runs at finer resolutions first."""
    stride = madds = 0
    for conv in module.conv_proj.modules():
        if isinstance(conv, nn.Conv2d):
            stride = conv.stride[0] * (stride or 1)
            madds += conv.weight.numel() * (module.patch_size // stride) ** 2
    return madds
