"""How the blocks of timm's VisionTransformer and Eva come apart."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from agglo.hosts.vit.base import Parts, Projected, matrix_entries
from agglo.hosts.vit.reading import is_plain_linear, linear_rows

_POST_NORM = ("ResPostBlock", "EvaBlockPostNorm")


class _TimmParts(Parts):
    """Blocks with norm1, attn, norm2, mlp; the two LayerScales are ls1/ls2 modules or gamma_1/gamma_2 vectors."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return cast(Tensor, block(x) if rotary is None else block(x, rope=rotary))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        attn = block.attn
        x = x if _is_post_norm(block) else block.norm1(x)
        q, k, v = _qkv(attn, x, n_front)
        q, k = attn.q_norm(q), attn.k_norm(k)
        features = k
        if rotary is not None:
            prefix, half = attn.num_prefix_tokens, getattr(attn, "rotate_half", False)
            q = q if n_front is not None else _rotated(q, rotary, prefix, half)  # prefix tokens have no position
            q, k = q.type_as(v), _rotated(k, rotary, prefix, half).type_as(v)
        if k.shape[1] != q.shape[1]:  # grouped queries
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        gate = getattr(attn, "gate", None)
        return Projected(
            q,
            k,
            v,
            features=features,
            gate=None if gate is None else gate(_front(x, n_front)).sigmoid(),
            scale=attn.scale,
            dropout=attn.attn_drop.p if attn.training else 0.0,
        )

    def project_front(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int) -> Projected:
        return self.project(block, x, rotary, n_front)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        attn = block.attn
        out = attended.transpose(1, 2).flatten(2)
        if hasattr(attn, "norm"):
            out = attn.norm(out)
        if projected.gate is not None:
            out = out * projected.gate
        out = attn.proj_drop(attn.proj(out))
        out = block.norm1(out) if _is_post_norm(block) else _scaled(block, out, "ls1", "gamma_1")
        return x + cast(Tensor, block.drop_path1(out))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        if _is_post_norm(block):
            return x + cast(Tensor, block.drop_path2(block.norm2(block.mlp(x))))
        return x + cast(Tensor, block.drop_path2(_scaled(block, block.mlp(block.norm2(x)), "ls2", "gamma_2")))


def _is_post_norm(block: nn.Module) -> bool:
    return type(block).__name__ in _POST_NORM


def _scaled(block: nn.Module, x: Tensor, module_name: str, vector_name: str) -> Tensor:
    if hasattr(block, module_name):
        return cast(Tensor, getattr(block, module_name)(x))
    gamma = getattr(block, vector_name, None)
    return x if gamma is None else gamma * x


def _front(x: Tensor, n_front: int | None) -> Tensor:
    return x if n_front is None else x[:, :n_front]


def _qkv(attn: Any, x: Tensor, n_front: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, d); k and v may have fewer heads, and q may be of the first tokens alone."""

    def heads(tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:-1], -1, attn.head_dim).transpose(1, 2)

    if attn.qkv is None:
        return heads(attn.q_proj(_front(x, n_front))), heads(attn.k_proj(x)), heads(attn.v_proj(x))
    biases = None if getattr(attn, "q_bias", None) is None else torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    if n_front is not None and is_plain_linear(attn.qkv):
        width, weight = attn.num_heads * attn.head_dim, attn.qkv.weight
        bias = attn.qkv.bias if biases is None else biases  # timm has one or the other
        asked = linear_rows(x, weight, bias, slice(width, None))
        k, v = asked.reshape(*asked.shape[:-1], 2, -1, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return heads(linear_rows(x[:, :n_front], weight, bias, slice(width))), k, v
    qkv = attn.qkv(x) if biases is None else attn.qkv(x) + biases
    # Not unflatten: in an ONNX file written by way of TorchScript it fixes the batch size.
    q, k, v = qkv.reshape(*qkv.shape[:-1], 3, -1, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return q if n_front is None else q[:, :, :n_front], k, v


def asking_weights(attn: Any) -> int:
    """Matrix entries that tokens meet as they ask."""
    others = matrix_entries(attn.proj, getattr(attn, "gate", None))
    if attn.qkv is None:
        return others + matrix_entries(attn.q_proj)
    return others + (attn.num_heads * attn.head_dim * attn.qkv.in_features if is_plain_linear(attn.qkv) else 0)


def _rotated(x: Tensor, table: Tensor, prefix: int, half: bool) -> Tensor:
    from timm.layers.pos_embed_sincos import apply_rot_embed_cat

    return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], table, half)], dim=2)


PARTS = _TimmParts()
