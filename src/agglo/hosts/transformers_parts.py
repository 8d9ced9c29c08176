"""How the layers of transformers' vision models come apart. Three kinds cover every supported family."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.base import Parts, Projected


class LayerParts(Parts):
    """A pre-norm layer: which names its submodules have, and what happens to a branch before it is added.

    layers, attentions: the classes known to be built this way.
    """

    layers: ClassVar[tuple[str, ...]]
    attentions: ClassVar[tuple[str, ...]]
    norms: ClassVar[tuple[str, str]]
    attention_name: ClassVar[str] = "attention"
    output_name: ClassVar[str] = "o_proj"
    scale_name: ClassVar[str] = "scaling"
    dropout_name: ClassVar[str] = "attention_dropout"

    def attention(self, block: nn.Module) -> Any:
        return getattr(block, self.attention_name)

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        """What attention (which = 0) or the MLP (1) gave, as it is added to the tokens (B, T, C)."""
        return out

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        # Not by calling the block: transformers hangs hooks on it that would collect merged tokens as hidden states,
        # and it would do its own gradient checkpointing inside of ours.
        return cast(Tensor, block.forward(x, None))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None) -> Projected:
        attention, x = self.attention(block), getattr(block, self.norms[0])(x)

        def heads(tensor: Tensor) -> Tensor:
            return tensor.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        return Projected(
            heads(attention.q_proj(x)),
            heads(attention.k_proj(x)),
            heads(attention.v_proj(x)),
            scale=getattr(attention, self.scale_name),
            dropout=getattr(attention, self.dropout_name) if attention.training else 0.0,
        )

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        out = getattr(self.attention(block), self.output_name)(attended.transpose(1, 2).flatten(2))
        return x + self.branch(block, out, 0)

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + self.branch(block, block.mlp(getattr(block, self.norms[1])(x)), 1)


class ViTParts(LayerParts):
    """ViT, DeiT, ViTMAE: dropout on both branches."""

    layers = ("ViTLayer", "DeiTLayer", "ViTMAELayer")
    attentions = ("ViTAttention", "DeiTAttention", "ViTMAEAttention")
    norms = ("layernorm_before", "layernorm_after")

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return cast(Tensor, block.dropout(out))


class DinoParts(LayerParts):
    """DINOv2: LayerScale and stochastic depth on both branches."""

    layers = ("Dinov2Layer", "Dinov2WithRegistersLayer")
    attentions = ("Dinov2Attention", "Dinov2WithRegistersAttention")
    norms = ("norm1", "norm2")

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return cast(Tensor, block.drop_path((block.layer_scale1, block.layer_scale2)[which](out)))


class CLIPParts(LayerParts):
    """CLIP and SigLIP: plain branches."""

    layers = ("CLIPEncoderLayer", "SiglipEncoderLayer")
    attentions = ("CLIPAttention", "SiglipAttention")
    norms = ("layer_norm1", "layer_norm2")
    attention_name = "self_attn"
    output_name = "out_proj"
    scale_name = "scale"
    dropout_name = "dropout"
