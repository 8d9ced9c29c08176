"""torchvision's and open_clip's own vision transformers, whose loop over blocks is in a separate module.

Embedding, pooling and projection around that module stay the library's. Towers of open_clip that are timm models
(TimmModel) belong to the timm host.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.common.base import Host, Layout, matrix_entries, refuse_given, require_no_bypass, require_own
from agglo.hosts.common.blocks import Parts, Projected
from agglo.hosts.common.layers import LayerParts, Structure, get, require_structure
from agglo.hosts.common.loop import BlockLoop, Given
from agglo.hosts.common.probe import plain_case, prove
from agglo.hosts.common.swap import Head, PassSetup, ReducedModule, UnsupportedModelError, begins_pass

_PREFIX = 1  # the class token, always there
_READS_CLASS_TOKEN = (("pool_type", "tok"), ("attn_pool", None), ("output_tokens", False))


class _EncoderParts(LayerParts):
    """A block that attends by torch's nn.MultiheadAttention."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        if getattr(get(block, self.structure.attention), "batch_first", True):
            return cast(Tensor, block(x))
        return cast(Tensor, block(x.transpose(0, 1)).transpose(0, 1))


class _CustomParts(_EncoderParts):
    """open_clip's CustomResidualAttentionBlock: its own attention, with norms and scales in between."""

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        scale = block.attn.head_scale
        return super().join(block, x, attended if scale is None else attended * scale, projected)

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return super().branch(block, out if which else block.ln_attn(out), which)


def _parts_of(block: nn.Module, structure: Structure | None = None) -> Parts:
    kind = _CustomParts if hasattr(block, "ln_attn") else _EncoderParts
    return kind(structure or Structure.of(block), {})


class _EncoderLoop(BlockLoop):
    instead: Given = MappingProxyType({"grad_checkpointing": False, "batch_first": True})  # open_clip's

    def __init__(self, owner: Any, setup: PassSetup, *, lazy: bool = False) -> None:
        self.blocks_name = "resblocks" if hasattr(owner, "resblocks") else "layers"
        super().__init__(owner, setup, lazy=lazy)

    def parts(self, block: nn.Module, given: Given) -> Parts:
        refuse_given(attn_mask=given.get("attn_mask"))
        return _parts_of(block, self.known_of(block, Structure.of))


class _ReducedEncoder(ReducedModule):
    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return _EncoderLoop(self, setup, lazy=True).call("forward", *args, **kwargs)

    @begins_pass
    def forward_intermediates(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        """Run open_clip's method of this name."""
        return _EncoderLoop(self, setup).call("forward_intermediates", *args, **kwargs)


class _EncoderHost(Host):
    """A model whose class token is its first one, and whose encoder holds the loop over blocks."""

    package: ClassVar[str]
    encoder: ClassVar[str]

    def blocks(self, module: Any) -> Any:
        return next(
            child for child in self.loop(module).children() if isinstance(child, (nn.ModuleList, nn.Sequential))
        )

    def check(self, module: Any) -> None:
        require_no_bypass(self.loop(module), ("forward", "forward_intermediates"), self.package)
        require_structure(module, self.blocks(module))

    def prove(self, module: Any) -> None:
        prove(self.blocks(module), type(module).__name__, lambda block: plain_case(block, _parts_of(block)))

    def loop(self, module: Any) -> nn.Module:
        return cast(nn.Module, getattr(module, self.encoder))

    def layout_with(self, module: Any, **sizes: Any) -> Layout:
        """Return the layout, given the fields that are not decided by a block."""
        blocks = self.blocks(module)
        sizes |= Structure.of(blocks[0]).sizes(blocks[0])
        return Layout(depth=len(blocks), prefix=_PREFIX, **sizes)

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return _ReducedEncoder


class TorchvisionViT(_EncoderHost):
    """torchvision's VisionTransformer."""

    model_classes: ClassVar[tuple[str, ...]] = ("torchvision.VisionTransformer",)
    package, encoder = "torchvision", "encoder"

    def layout(self, module: Any) -> Layout:
        # One convolution, or a stem of several that runs at finer resolutions first.
        stride = madds = 0
        for conv in module.conv_proj.modules():
            if isinstance(conv, nn.Conv2d):
                stride = conv.stride[0] * (stride or 1)
                madds += conv.weight.numel() * (module.patch_size // stride) ** 2
        return self.layout_with(
            module,
            patches=module.encoder.pos_embedding.shape[1] - _PREFIX,
            embedding_weights=madds,
            head_madds=matrix_entries(module.heads),
            grid=(module.image_size // module.patch_size,) * 2,
        )

    def head(self, model: nn.Module, module: nn.Module) -> Head:
        require_own(module, ("forward",), "torchvision")
        return Head(reads=_PREFIX, reader=module, loop="encoder", watched=("encoder.ln",))


class OpenClipViT(_EncoderHost):
    """open_clip's VisionTransformer, with plain and custom blocks."""

    model_classes: ClassVar[tuple[str, ...]] = ("open_clip.VisionTransformer",)
    package, encoder = "open_clip", "transformer"

    def check(self, module: Any) -> None:
        super().check(module)
        if any(getattr(block.attn, "logit_scale", None) is not None for block in self.blocks(module)):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends by scaled cosines; supported: scaled dot products"
            )

    def layout(self, module: Any) -> Layout:
        n_tokens = len(module.positional_embedding)
        return self.layout_with(
            module,
            patches=n_tokens - _PREFIX,
            embedding_weights=matrix_entries(module.conv1),
            head_madds=_head_madds(module, n_tokens),
            grid=(int(module.grid_size[0]), int(module.grid_size[1])),
        )

    def head(self, model: nn.Module, module: Any) -> Head:
        require_own(module, ("forward", "_global_pool"), "open_clip")
        for name, value in _READS_CLASS_TOKEN:
            if getattr(module, name) != value:
                raise UnsupportedModelError(
                    f"last_block='class_token' needs a head that reads the class token alone ({name}={value!r}); this "
                    f"{type(module).__name__} has {name}={getattr(module, name)!r}"
                )
        return Head(reads=_PREFIX, reader=module, loop="transformer", watched=("ln_post",), settings=_READS_CLASS_TOKEN)


def _head_madds(module: Any, n_tokens: int) -> int:
    """Return those of projection and attention pooling, which reads all n_tokens."""
    madds = 0 if module.proj is None else module.proj.numel()
    for name in ("attn_pool", "attn_pool_contrastive"):
        pooler = getattr(module, name, None)
        if pooler is not None:
            attn, (n_queries, width) = pooler.attn, pooler.query.shape
            madds += 2 * n_queries * width * width + n_tokens * width * (attn.kdim + attn.vdim + 2 * n_queries)
            n_tokens = n_queries if module.attn_pool_type == "cascade" else n_tokens
    return int(madds)
