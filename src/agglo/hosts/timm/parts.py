"""How timm's blocks come apart: those of VisionTransformer, Eva, BEiT and CaiT, and blocks of parallel branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.base import matrix_entries
from agglo.hosts.common.blocks import Parts, Projected, front_and_rest, split_heads
from agglo.hosts.common.readers import is_plain_linear

_POST_NORM = ("ResPostBlock", "EvaBlockPostNorm")


@dataclass(frozen=True)
class TimmParts(Parts):
    """Blocks with norm1, attn, norm2, mlp; the two LayerScales are ls1/ls2 modules or gamma_1/gamma_2 vectors.

    Args:
        given: What timm calls the block with beside the tokens.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_all_tokens(self) -> bool:  # type: ignore[override]
        return any(value is not None and value is not False for name, value in self.given.items() if name != "rope")

    @property
    def treats_images_alike(self) -> bool:  # type: ignore[override]
        return not self.needs_all_tokens

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        given = self.given if rotary is None else {**self.given, "rope": rotary}
        return cast(Tensor, block(x, **given))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        return self.attention_of(block.attn, x if _is_post_norm(block) else block.norm1(x), rotary, n_front)

    def attention_of(self, attn: Any, x: Tensor, rotary: Tensor | None, n_front: int | None) -> Projected:
        """The projections of normed tokens."""
        q, k, v = _qkv(attn, x, n_front)
        if hasattr(attn, "q_norm"):
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

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        attn = block.attn
        out = attended.transpose(1, 2).flatten(2)
        out = _output(attn, out, projected.gate)
        out = block.norm1(out) if _is_post_norm(block) else _scaled(block, out, "ls1", "gamma_1")
        return x + _dropped(block, out, "drop_path1")

    def feed(self, block: Any, x: Tensor) -> Tensor:
        if _is_post_norm(block):
            return x + _dropped(block, block.norm2(block.mlp(x)), "drop_path2")
        return x + _dropped(block, _scaled(block, block.mlp(block.norm2(x)), "ls2", "gamma_2"), "drop_path2")


class _ParallelParts(TimmParts):
    """ParallelThingsBlock: several attentions side by side are one of all their heads; then several MLPs."""

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        each = [self.attention_of(one.attn, one.norm(x), rotary, n_front) for one in block.attns]
        q, k, v = (torch.cat([getattr(one, name) for one in each], dim=1) for name in "qkv")
        return replace(each[0], q=q, k=k, v=v, features=k)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        heads = attended.chunk(len(block.attns), dim=1)
        outs = [
            one.drop_path(one.ls(_output(one.attn, out.transpose(1, 2).flatten(2), None)))
            for one, out in zip(block.attns, heads, strict=True)
        ]
        return x + torch.stack(outs).sum(dim=0)

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + torch.stack([one(x) for one in block.ffns]).sum(dim=0)


class _TalkingParts(TimmParts):
    """CaiT: heads are mixed before and after the softmax.

    The last mix adds a constant to every weight, which s copies of a token get s times: so does a token of size s.
    """

    def attend(self, block: Any, projected: Projected, sizes: Tensor | None) -> Tensor:
        attn, scale = block.attn, cast(float, projected.scale)
        logits = (projected.q * scale) @ projected.k.transpose(-2, -1)
        logits = attn.proj_l(logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if sizes is None:
            weights = attn.proj_w(logits.softmax(dim=-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            weights = (logits + sizes.log().to(logits.dtype)[:, None, None]).softmax(dim=-1).permute(0, 2, 3, 1)
            mixed, constant = F.linear(weights, attn.proj_w.weight), attn.proj_w.bias
            weights = mixed + sizes.to(mixed.dtype)[:, None, :, None] * constant
            weights = weights.permute(0, 3, 1, 2)
        return cast(Tensor, attn.attn_drop(weights) @ projected.v)


def parts_of(block: nn.Module, given: Mapping[str, Any] | None = None) -> TimmParts:
    """Return how a block comes apart that timm calls with the given arguments beside the tokens."""
    if hasattr(block, "attns"):
        kind: type[TimmParts] = _ParallelParts
    else:
        kind = _TalkingParts if hasattr(getattr(block, "attn", None), "proj_l") else TimmParts
    return kind(given or {})


def _output(attn: Any, out: Tensor, gate: Tensor | None) -> Tensor:
    """The output projection of attended tokens (B, T, heads * d)."""
    out = attn.norm(out) if hasattr(attn, "norm") else out
    out = out if gate is None else out * gate
    return cast(Tensor, attn.proj_drop(attn.proj(out)))


def _dropped(block: Any, out: Tensor, name: str) -> Tensor:
    """Stochastic depth, of each branch or of both."""
    return cast(Tensor, (getattr(block, name) if hasattr(block, name) else block.drop_path)(out))


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
    """Return q, k, v (B, H, T, d); k and v may have fewer heads, and q may be of the first tokens alone."""
    width = head_width(attn)
    if attn.qkv is None:
        projected = attn.q_proj(_front(x, n_front)), attn.k_proj(x), attn.v_proj(x)
        q, k, v = (split_heads(each, each.shape[-1] // width, 1)[0] for each in projected)
        return q, k, v
    biases = None if getattr(attn, "q_bias", None) is None else torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    if n_front is not None and is_plain_linear(attn.qkv):
        bias = attn.qkv.bias if biases is None else biases  # timm has one or the other
        front, rest = front_and_rest(x, attn.qkv.weight, bias, n_front)
        (q,), (k, v) = split_heads(front, attn.num_heads, 1), split_heads(rest, attn.num_heads, 2)
        return q, k, v
    q, k, v = split_heads(attn.qkv(x) if biases is None else attn.qkv(x) + biases, attn.num_heads, 3)
    return q if n_front is None else q[:, :, :n_front], k, v


def head_width(attn: Any) -> int:
    """Channels of a head; BEiT and CaiT do not say."""
    found = getattr(attn, "head_dim", None)
    return int(attn.qkv.out_features // 3 // attn.num_heads if found is None else found)


def block_weights(block: Any) -> tuple[int, int, int, int, int]:
    """Return matrix entries of attention, those of its query side, those of the MLP; heads and their width."""
    branches = len(block.attns) if hasattr(block, "attns") else 1
    attn, mlp = (block.attns[0].attn, block.ffns[0].mlp) if hasattr(block, "attns") else (block.attn, block.mlp)
    numbers = matrix_entries(attn), _query_side_params(attn), matrix_entries(mlp), attn.num_heads
    attention, query_side, mlp_entries, heads = (branches * number for number in numbers)
    return attention, query_side, mlp_entries, heads, head_width(attn)


def _query_side_params(attn: Any) -> int:
    """Return matrix entries that only queries meet."""
    others = matrix_entries(attn.proj, getattr(attn, "gate", None))
    if attn.qkv is None:
        return others + matrix_entries(attn.q_proj)
    return others + (attn.num_heads * head_width(attn) * attn.qkv.in_features if is_plain_linear(attn.qkv) else 0)


def _rotated(x: Tensor, table: Tensor, prefix: int, half: bool) -> Tensor:
    from timm.layers.pos_embed_sincos import apply_rot_embed_cat

    return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], table, half)], dim=2)
