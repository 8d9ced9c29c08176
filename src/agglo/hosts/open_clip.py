"""open_clip's own vision towers. Towers that are timm models (TimmModel) belong to the timm host.

The tower's Transformer holds the loop over blocks; embedding, pooling and projection around it stay open_clip's.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.common.base import Host, Layout, matrix_entries, require_no_bypass, require_own
from agglo.hosts.common.blocks import Parts, Projected
from agglo.hosts.common.layers import LayerParts, Structure, require_structure
from agglo.hosts.common.loop import BlockLoop, Given
from agglo.hosts.common.probe import plain_case, prove
from agglo.hosts.common.readers import Head
from agglo.hosts.common.refusals import refuse_given
from agglo.hosts.common.swap import PassSetup, ReducedModule, UnsupportedModelError, begins_pass

_PREFIX = 1  # the class token, always there
_READS_CLASS_TOKEN = (("pool_type", "tok"), ("attn_pool", None), ("output_tokens", False))


class _OpenClipParts(LayerParts):
    """ResidualAttentionBlock: the attention is torch's."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        if getattr(block.attn, "batch_first", True):
            return cast(Tensor, block(x))
        return cast(Tensor, block(x.transpose(0, 1)).transpose(0, 1))


class _CustomParts(_OpenClipParts):
    """CustomResidualAttentionBlock: open_clip's own attention with norms and scales in between."""

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        scale = block.attn.head_scale
        return super().join(block, x, attended if scale is None else attended * scale, projected)

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return super().branch(block, out if which else block.ln_attn(out), which)


def _parts_of(block: nn.Module, structure: Structure) -> Parts:
    return (_CustomParts if hasattr(block, "ln_attn") else _OpenClipParts)(structure, {})


class _TransformerLoop(BlockLoop):
    blocks_name = "resblocks"
    instead: Given = MappingProxyType({"grad_checkpointing": False, "batch_first": True})

    def parts(self, block: nn.Module, given: Given) -> Parts:
        refuse_given(attn_mask=given.get("attn_mask"))
        return _parts_of(block, self.structure(block))


class _ReducedTransformer(ReducedModule):
    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return _TransformerLoop(self, setup, lazy=True).call("forward", *args, **kwargs)

    @begins_pass
    def forward_intermediates(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return _TransformerLoop(self, setup).call("forward_intermediates", *args, **kwargs)


class OpenClipViT(Host):
    """open_clip's VisionTransformer, with plain and custom blocks."""

    model_classes: ClassVar[tuple[str, ...]] = ("open_clip.VisionTransformer",)

    def check(self, module: Any) -> None:
        require_no_bypass(module.transformer, ("forward", "forward_intermediates"), "open_clip")
        require_structure(module, module.transformer.resblocks)
        if any(getattr(block.attn, "logit_scale", None) is not None for block in module.transformer.resblocks):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends by scaled cosines; supported: scaled dot products"
            )

    def prove(self, module: Any) -> None:
        blocks, name = module.transformer.resblocks, type(module).__name__
        prove(blocks, name, lambda block: plain_case(block, _parts_of(block, Structure.of(block))))

    def loop(self, module: Any) -> nn.Module:
        return cast(nn.Module, module.transformer)

    def layout(self, module: Any) -> Layout:
        blocks = module.transformer.resblocks
        n_tokens = len(module.positional_embedding)
        return Layout(
            depth=len(blocks),
            prefix=_PREFIX,
            patches=n_tokens - _PREFIX,
            embedding_weights=matrix_entries(module.conv1),
            head_madds=_head_madds(module, n_tokens),
            grid=(int(module.grid_size[0]), int(module.grid_size[1])),
            **Structure.of(blocks[0]).sizes(blocks[0]),
        )

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return _ReducedTransformer

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
    """Attention pooling reads all n_tokens, since they are unmerged before it."""
    madds = 0 if module.proj is None else module.proj.numel()
    for name in ("attn_pool", "attn_pool_contrastive"):
        pooler = getattr(module, name, None)
        if pooler is not None:
            attn, (n_queries, width) = pooler.attn, pooler.query.shape
            madds += 2 * n_queries * width * width + n_tokens * width * (attn.kdim + attn.vdim + 2 * n_queries)
            n_tokens = n_queries if module.attn_pool_type == "cascade" else n_tokens
    return int(madds)
