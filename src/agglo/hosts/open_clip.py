"""open_clip's own vision towers. Towers that are timm models (TimmModel) belong to the timm host.

The tower's Transformer holds the loop over blocks; embedding, pooling and projection around it stay open_clip's.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.common import packed_attention
from agglo.hosts.common.base import Host, Layout, matrix_entries, require_kind, require_no_bypass, require_own
from agglo.hosts.common.blocks import Parts, Projected
from agglo.hosts.common.loop import Given, Loop
from agglo.hosts.common.readers import Head
from agglo.hosts.common.refusals import refuse_given
from agglo.hosts.common.swap import PassSetup, ReducedModule, UnsupportedModelError, begins_pass

_PREFIX = 1  # the class token, always there
_READS_CLASS_TOKEN = (("pool_type", "tok"), ("attn_pool", None), ("output_tokens", False))
_PLAIN, _CUSTOM = "ResidualAttentionBlock", "CustomResidualAttentionBlock"


class _PlainParts(Parts):
    """ResidualAttentionBlock: ln_1, attn, ls_1, ln_2, mlp, ls_2, the attention torch's own."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        if block.attn.batch_first:
            return cast(Tensor, block(x))
        return cast(Tensor, block(x.transpose(0, 1)).transpose(0, 1))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        return packed_attention.project(block.attn, block.ln_1(x), n_front)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        return x + cast(Tensor, block.ls_1(packed_attention.output(block.attn, attended)))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + cast(Tensor, block.ls_2(block.mlp(block.ln_2(x))))


class _CustomParts(_PlainParts):
    """CustomResidualAttentionBlock: open_clip's own attention with norms and scales in between."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return cast(Tensor, block(x))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        attn = block.attn
        q, k, v = packed_attention.packed_qkv(attn, block.ln_1(x), n_front)
        return Projected(attn.ln_q(q), attn.ln_k(k), v, dropout=attn.attn_drop.p if attn.training else 0.0)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        attn = block.attn
        attended = attended if attn.head_scale is None else attended * attn.head_scale
        out = attn.out_drop(attn.out_proj(attn.ln_inner(attended.transpose(1, 2).flatten(2))))
        return x + cast(Tensor, block.ls_1(block.ln_attn(out)))


_PARTS: dict[str, Parts] = {_PLAIN: _PlainParts(), _CUSTOM: _CustomParts()}


class _TransformerLoop(Loop):
    blocks_name = "resblocks"
    instead: Given = MappingProxyType({"grad_checkpointing": False, "batch_first": True})

    def parts(self, block: nn.Module, given: Given) -> Parts:
        refuse_given(attn_mask=given.get("attn_mask"))
        return _PARTS[type(block).__name__]


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
        require_kind(module, module.transformer.resblocks, tuple(_PARTS), "is built from")
        for block in module.transformer.resblocks:
            if type(block).__name__ == _PLAIN:
                packed_attention.require_packed(block.attn)
            elif block.attn.logit_scale is not None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} attends by scaled cosines; supported: scaled dot products"
                )

    def loop(self, module: Any) -> nn.Module:
        return cast(nn.Module, module.transformer)

    def layout(self, module: Any) -> Layout:
        blocks = module.transformer.resblocks
        n_tokens, width = module.positional_embedding.shape
        return Layout(
            depth=len(blocks),
            prefix=_PREFIX,
            patches=n_tokens - _PREFIX,
            attention_weights=matrix_entries(blocks[0].attn),
            attention_width=width,
            mlp_weights=matrix_entries(blocks[0].mlp),
            embedding_weights=matrix_entries(module.conv1),
            head_madds=_head_madds(module, n_tokens),
            width=width,
            heads=blocks[0].attn.num_heads,
            grid=(int(module.grid_size[0]), int(module.grid_size[1])),
            query_side_params=packed_attention.query_side_params(blocks[0].attn),
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
