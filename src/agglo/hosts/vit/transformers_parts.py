"""How the layers of transformers' vision models come apart. Three kinds cover every supported family.

The names of submodules moved between versions: up to 5.6 (DINOv2: 5.12) attention was nested, as
`attention.attention.query` and `attention.output.dense`; now it is `attention.q_proj` and `attention.o_proj`.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.vit.base import Parts, Projected


class LayerParts(Parts):
    """A pre-norm layer.

    families, layer: the classes known to be built this way are a family's name followed by this ending.
    norms: what the norms before attention and MLP are called.
    masks: what a layer must be given after the tokens.
    """

    families: ClassVar[tuple[str, ...]]
    layer: ClassVar[str] = "Layer"
    norms: ClassVar[tuple[str, str]]
    masks: ClassVar[tuple[None, ...]] = ()

    def unknown(self, block: Any) -> str | None:
        """The class of the layer or its attention, if that is none that is built this way."""
        layers = [family + self.layer for family in self.families]
        if type(block).__name__ not in layers:
            return type(block).__name__
        kinds = ("Attention", "SelfAttention", "SdpaAttention")
        attention = type(self.attention(block)).__name__
        return None if attention in [family + kind for family in self.families for kind in kinds] else attention

    def attention(self, block: Any) -> Any:
        """The module that holds the q, k, v projections."""
        return getattr(block.attention, "attention", block.attention)

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        """What attention (which = 0) or the MLP (1) gave, as it is added to the tokens (B, T, C)."""
        return out

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        # Not by calling the block: transformers hangs hooks on it that would collect merged tokens as hidden states,
        # and it would do its own gradient checkpointing inside of ours.
        out = block.forward(x, *self.masks)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        attention, x = self.attention(block), getattr(block, self.norms[0])(x)
        width = _first(attention, "head_dim", "attention_head_size")

        def heads(x: Tensor, *names: str) -> Tensor:
            return cast(Tensor, _first(attention, *names)(x).unflatten(-1, (-1, width)).transpose(1, 2))

        return Projected(
            heads(x if n_front is None else x[:, :n_front], "q_proj", "query"),
            heads(x, "k_proj", "key"),
            heads(x, "v_proj", "value"),
            scale=_first(attention, "scaling", "scale"),
            dropout=_first(attention, "attention_dropout", "dropout_prob", "dropout") if attention.training else 0.0,
        )

    def project_front(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int) -> Projected:
        return self.project(block, x, rotary, n_front)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        attended = attended.transpose(1, 2).flatten(2)
        nested = getattr(block.attention, "output", None)
        out = block.attention.o_proj(attended) if nested is None else nested(attended, x)
        return x + self.branch(block, out, 0)

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + self.branch(block, block.mlp(getattr(block, self.norms[1])(x)), 1)

    def mlp(self, block: Any) -> list[nn.Module]:
        return [block.mlp]


class ViTParts(LayerParts):
    """ViT, DeiT, ViTMAE: dropout on both branches. Where attention is nested, dropout is inside `output`, and the
    MLP's `output` adds the residual too."""

    families = ("ViT", "DeiT", "ViTMAE")
    norms = ("layernorm_before", "layernorm_after")

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return cast(Tensor, block.dropout(out)) if hasattr(block, "dropout") else out

    def feed(self, block: Any, x: Tensor) -> Tensor:
        if hasattr(block, "mlp"):
            return super().feed(block, x)
        return cast(Tensor, block.output(block.intermediate(block.layernorm_after(x)), x))

    def mlp(self, block: Any) -> list[nn.Module]:
        return [block.mlp] if hasattr(block, "mlp") else [block.intermediate, block.output]


class DinoParts(LayerParts):
    """DINOv2: LayerScale and stochastic depth on both branches."""

    families = ("Dinov2", "Dinov2WithRegisters")
    norms = ("norm1", "norm2")

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return cast(Tensor, block.drop_path((block.layer_scale1, block.layer_scale2)[which](out)))


class CLIPParts(LayerParts):
    """CLIP and SigLIP: plain branches."""

    families = ("CLIP", "Siglip")
    layer = "EncoderLayer"
    norms = ("layer_norm1", "layer_norm2")
    masks = (None,)

    def attention(self, block: Any) -> Any:
        return block.self_attn

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        return x + cast(Tensor, block.self_attn.out_proj(attended.transpose(1, 2).flatten(2)))


def _first(module: Any, *names: str) -> Any:
    """The attribute under the first name the module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))
