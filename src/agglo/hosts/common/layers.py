"""How a block comes apart, found by what it has and not by its class.

Libraries copy one layer under different names: norms, q, k, v projections or a fused one, output projection, MLP, and
on both branches any of dropout, LayerScale, gates and stochastic depth. `Structure.of` finds the names, and `probe.py`
proves what the block does with them. torch's nn.MultiheadAttention uses the weights of its projections without calling
them, and so does `LayerParts`: what wraps one is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from agglo.hosts.common.base import matrix_entries
from agglo.hosts.common.blocks import Parts, Projected
from agglo.hosts.common.swap import UnsupportedModelError, is_plain_linear

_NORMS = (
    ("layernorm_before", "layernorm_after"), ("layer_norm1", "layer_norm2"), ("norm1", "norm2"), ("ln_1", "ln_2"),
    ("rms_norm1", "rms_norm2"), ("input_layernorm", "post_attention_layernorm"), ("attention_norm", "ffn_norm"),
)  # fmt: skip
_POST_NORM = ("ResPostBlock", "EvaBlockPostNorm")  # norms come after attention and MLP
_ATTENTIONS = ("self_attn", "self_attention", "attention.attention", "attention", "attn")
_PACKED = ("in_proj_weight",)
_QKV = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("qkv",), _PACKED)
_QK_NORMS = (("q_norm", "ln_q"), ("k_norm", "ln_k"))
_INNER_NORMS = ("norm", "ln_inner")
_OUTPUTS = ("o_proj", "out_proj", "projection_layer", "projection", "proj")
_OUTPUT_DROPOUTS = ("proj_drop", "projection_dropout", "out_drop")
_MLPS = ("mlp", "ffn", "feed_forward")
_SCALES = (
    ("layer_scale1", "layer_scale2"), ("lambda_1", "lambda_2"), ("ls1", "ls2"), ("ls_1", "ls_2"),
    ("gamma_1", "gamma_2"),
)  # fmt: skip
_DROP_PATHS = (("drop_path", "drop_path"), ("drop_path1", "drop_path2"))
_GATES = (("gate_attn", "gate_ffn"),)
_DROPOUTS = ("attention_dropout", "dropout_prob", "attn_drop", "dropout")
_WIDTHS = ("head_dim", "attention_head_size")
_HEADS = ("num_heads", "num_attention_heads")
_LOGIT_SCALES = ("scaling", "scale")
_EXPERTS = "dataset_index"  # ViTPose says by this argument which expert an image has


@dataclass(frozen=True)
class Structure:
    """The names under which a block has its parts; dotted where they are nested."""

    norms: tuple[str, str]
    attention: str
    qkv: tuple[str, ...]
    output: str
    output_takes_both: bool  # also the block's input
    mlp: tuple[str, ...]  # one module, or two
    mlp_adds: bool  # whether the second one adds the residual itself
    scales: tuple[str, str] | None  # LayerScale of both branches, modules or vectors
    gates: tuple[str, str] | None  # vectors whose tanh scales the branches
    drop_paths: tuple[str, str] | None
    drops: tuple[bool, bool]  # which branches the block's own dropout acts on
    head_width: int
    post_norm: bool
    # Names within the attention, None where it has no such part.
    qk_norms: tuple[str | None, str | None]
    gate: str | None
    query_bias: str | None  # with a bias of keys and of values beside it, instead of one of the fused projection
    inner_norm: str | None
    output_dropout: str | None
    dropout: str | None
    scale: str | None
    experts: bool  # whether the MLP asks by an argument which expert an image has

    @staticmethod
    def of(block: Any) -> Structure:
        """Return what a block has. An UnsupportedModelError says what is missing, as the end of a sentence."""
        norms = _pair(block, _NORMS)
        if norms is None:
            raise UnsupportedModelError("has no two norms, before attention and MLP")
        candidates = [(path, names) for path in _ATTENTIONS for names in _QKV if _has(get(block, path), *names)]
        if not candidates:
            raise UnsupportedModelError("has no attention with projections to q, k and v")
        attention, qkv = candidates[0]
        inner, outer = get(block, attention), attention.split(".")[0]
        require_packed(inner)
        outputs = [f"{attention}.{name}" for name in _OUTPUTS if _has(inner, name)]
        outputs += [f"{outer}.output"] if _has(get(block, outer), "output") else []
        if not outputs:
            raise UnsupportedModelError("has no output projection")
        mlp: tuple[str, ...] = tuple(name for name in _MLPS if _has(block, name))[:1]
        if not mlp and _has(block, "intermediate", "output"):
            mlp = ("intermediate", "output")
        if not mlp:
            raise UnsupportedModelError("has no MLP")
        has_dropout = _has(block, "dropout")
        return Structure(
            norms=norms,
            attention=attention,
            qkv=qkv,
            output=outputs[0],
            output_takes_both=outputs[0].endswith(".output") and _arguments(get(block, outputs[0])) > 1,
            mlp=mlp,
            mlp_adds=len(mlp) == 2 and _arguments(block.output) > 1,
            scales=_pair(block, _SCALES),
            gates=_pair(block, _GATES),
            drop_paths=_pair(block, _DROP_PATHS),
            # Where attention ends with a dropout, or torchvision's MLP does, that of the block is for the other branch.
            drops=(has_dropout and not _has(inner, "projection_dropout"), has_dropout and qkv != _PACKED),
            head_width=_head_width(inner, qkv),
            post_norm=type(block).__name__ in _POST_NORM,
            qk_norms=(_name(inner, _QK_NORMS[0]), _name(inner, _QK_NORMS[1])),
            gate=_name(inner, ("gate",)),
            query_bias=_name(inner, ("q_bias",)),
            inner_norm=_name(inner, _INNER_NORMS),
            output_dropout=_name(inner, _OUTPUT_DROPOUTS),
            dropout=_name(inner, _DROPOUTS),
            scale=_name(inner, _LOGIT_SCALES),
            experts=getattr(block, "num_experts", 1) > 1,
        )

    def sizes(self, block: nn.Module) -> dict[str, int]:
        """Return the fields of `Layout` that a block decides."""
        attention = get(block, self.attention)
        projections = [getattr(attention, name) for name in self.qkv]
        output, qkv = get(block, self.output), matrix_entries(*projections)
        joining = matrix_entries(output, getattr(attention, "gate", None))
        if len(projections) == 3:
            q = matrix_entries(projections[0])
        else:  # a fused projection is a third each, unless an adapter or quantisation hides its rows
            q = qkv // 3 if fused_weight(attention, self.qkv) is not None else 0
        heads = int(_first(attention, _HEADS, 0)) or _out_features(projections[0]) // self.head_width
        return {
            "attention_weights": qkv + joining,
            "attention_width": heads * self.head_width,
            "mlp_weights": matrix_entries(*(getattr(block, name) for name in self.mlp)),
            "width": int(getattr(block, self.norms[0]).weight.shape[-1]),
            "heads": heads,
            "query_side_params": q + joining,
        }


@dataclass(frozen=True)
class LayerParts(Parts):
    """A block of a known structure, and the arguments that its library gives it with the tokens."""

    structure: Structure
    given: Mapping[str, Any]

    def whole(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Tensor:
        return cast(Tensor, block(x, **self.given))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        x = x if self.structure.post_norm else getattr(block, self.structure.norms[0])(x)
        return self.project_normed(get(block, self.structure.attention), x, rotary, n_front)

    def project_normed(self, attention: Any, x: Tensor, rotary: Tensor | None, n_front: int | None) -> Projected:
        """Return q, k and v of tokens that come out of the norm."""
        q, k, v = self._qkv(attention, x, n_front)
        features = k
        q, k = self.rotate(attention, q, k, rotary)
        if rotary is not None:
            q, k = q.type_as(v), k.type_as(v)
        if k.shape[1] != q.shape[1]:  # grouped queries
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        structure, dropout = self.structure, 0.0
        if attention.training and structure.dropout is not None:
            dropout = getattr(attention, structure.dropout)
        gate = None if structure.gate is None else getattr(attention, structure.gate)
        return Projected(
            q,
            k,
            v,
            features=features,
            gate=None if gate is None else gate(x[:, :n_front]).sigmoid(),
            scale=None if structure.scale is None else getattr(attention, structure.scale),
            dropout=float(getattr(dropout, "p", dropout)),
        )

    def rotate(self, attention: Any, q: Tensor, k: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return q and k (B, H, T, d) at their rotary positions; q may be only of the first prefix tokens."""
        return q, k

    def _qkv(self, attention: Any, x: Tensor, n_front: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v (B, H, T, d); k and v may have fewer heads, and q may be only of the first tokens."""
        names = self.structure.qkv
        if len(names) == 3:
            tokens = (x[:, :n_front], x, x)
            q, k, v = (getattr(attention, name)(each) for name, each in zip(names, tokens, strict=True))
        else:
            q, k, v = self._fused_qkv(attention, x, n_front)
        q_norm, k_norm = (None if name is None else getattr(attention, name) for name in self.structure.qk_norms)
        return self._heads(q, q_norm), self._heads(k, k_norm), self._heads(v, None)

    def _fused_qkv(self, attention: Any, x: Tensor, n_front: int | None) -> tuple[Tensor, ...]:
        packed, bias = self.structure.qkv == _PACKED, None
        weight = None if n_front is None else fused_weight(attention, self.structure.qkv)
        if packed:
            require_packed(attention)  # again: an adapter may have come after agglo.apply
            bias = attention.in_proj_bias
        elif self.structure.query_bias is not None and attention.q_bias is not None:
            bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        if weight is not None:
            width, bias = weight.shape[0] // 3, attention.qkv.bias if bias is None and not packed else bias
            q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
            q = F.linear(x[:, :n_front], weight[:width], q_bias)
            return q, *F.linear(x, weight[width:], kv_bias).chunk(2, dim=-1)
        if packed:
            projected = F.linear(x, attention.in_proj_weight, bias)
        else:
            projected = attention.qkv(x) if bias is None else attention.qkv(x) + bias
        q, k, v = projected.chunk(3, dim=-1)
        return q if n_front is None else q[:, :n_front], k, v

    def _heads(self, x: Tensor, norm: Any) -> Tensor:
        """Return x (B, T, H * d) as (B, H, T, d), normed as a whole or head by head."""
        # Not unflatten: in an ONNX file written by way of TorchScript it fixes the batch size.
        if norm is None or type(norm) is nn.Identity:
            x = x.reshape(*x.shape[:-1], -1, self.structure.head_width).transpose(1, 2)
            return x if norm is None else _through(norm, x)
        weight = getattr(norm, "weight", None)
        of_all = weight is not None and weight.shape[-1] == x.shape[-1]
        x = norm(x) if of_all else x
        x = x.reshape(*x.shape[:-1], -1, self.structure.head_width).transpose(1, 2)
        return x if of_all else cast(Tensor, norm(x))

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        out = self.output(block, x, attended, projected.gate)
        out = getattr(block, self.structure.norms[0])(out) if self.structure.post_norm else out
        return x + self.branch(block, out, 0)

    def output(self, block: Any, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Return the output projection (B, T, C) of attended (B, H, T, d)."""
        structure = self.structure
        out, attention = attended.transpose(1, 2).flatten(2), get(block, structure.attention)
        out = out if structure.inner_norm is None else _through(getattr(attention, structure.inner_norm), out)
        out = out if gate is None else out * gate
        module = get(block, structure.output)
        if isinstance(attention, nn.MultiheadAttention):
            out = F.linear(out, module.weight, module.bias)
        else:
            out = module(out, x) if structure.output_takes_both else module(out)
        return out if structure.output_dropout is None else _through(getattr(attention, structure.output_dropout), out)

    def feed(self, block: Any, x: Tensor) -> Tensor:
        structure, norm = self.structure, getattr(block, self.structure.norms[1])
        first, *second = (getattr(block, name) for name in structure.mlp)
        experts = {"indices": self.given[_EXPERTS]} if structure.experts else {}
        out = first(x if structure.post_norm else norm(x), **experts)
        if structure.mlp_adds:
            return cast(Tensor, second[0](out, x))
        out = second[0](out) if second else out
        return x + self.branch(block, norm(out) if structure.post_norm else out, 1)

    def branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        """Return what attention (which = 0) or the MLP (1) gave, as it is added to the tokens (B, T, C)."""
        structure = self.structure
        if structure.drops[which]:
            out = block.dropout(out)
        if structure.scales is not None:
            scale = getattr(block, structure.scales[which])
            out = _through(scale, out) if isinstance(scale, nn.Module) else scale * out
        if structure.gates is not None:
            out = getattr(block, structure.gates[which]).tanh() * out
        return out if structure.drop_paths is None else _through(getattr(block, structure.drop_paths[which]), out)


def fused_weight(attention: Any, qkv: tuple[str, ...]) -> Tensor | None:
    """Return a fused matrix of queries, keys and values whose rows can be used apart, if there is one."""
    if qkv == _PACKED:
        return cast(Tensor, attention.in_proj_weight)
    return attention.qkv.weight if len(qkv) == 1 and is_plain_linear(attention.qkv) else None


def require_packed(attention: Any) -> None:
    """Raise UnsupportedModelError for a nn.MultiheadAttention that is wrapped, or not plain self-attention."""
    kind = type(attention)
    if isinstance(attention, nn.MultiheadAttention) and kind is not nn.MultiheadAttention:
        raise UnsupportedModelError(
            f"attends by {kind.__name__} (from {kind.__module__}); supported: torch.nn.MultiheadAttention. Adapters "
            "around it must be merged into the weights first"
        )
    if getattr(attention, "bias_k", None) is not None or getattr(attention, "add_zero_attn", False):
        raise UnsupportedModelError("attends by a MultiheadAttention with add_bias_kv or add_zero_attn")


def require_structure(owner: nn.Module, blocks: Iterable[Any]) -> None:
    """Raise UnsupportedModelError, which names the block, if one has not the parts of a block that agglo knows."""
    for block in blocks:
        try:
            Structure.of(block)
        except UnsupportedModelError as missing:
            raise UnsupportedModelError(
                f"{type(owner).__name__} is built from {type(block).__name__}, which {missing}"
            ) from None


def get(module: Any, path: str) -> Any:
    """Return a nested attribute, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _arguments(module: Any) -> int:
    return len(inspect.signature(module.forward).parameters)


def _has(owner: Any, *names: str) -> bool:
    return all(isinstance(getattr(owner, name, None), (nn.Module, nn.Parameter)) for name in names)


def _pair(block: Any, pairs: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    """Return the first two names under which a block has something."""
    return next((pair for pair in pairs if all(getattr(block, name, None) is not None for name in pair)), None)


def _first(module: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the attribute under the first name the module has."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), default)


def _name(module: Any, names: tuple[str, ...]) -> str | None:
    """Return the first name under which the module has something."""
    return next((name for name in names if hasattr(module, name)), None)


def _through(module: Any, x: Tensor) -> Tensor:
    """Return module(x), without the call where that is x: a call of an identity takes longer than a small addition."""
    kind = type(module)
    if kind is nn.Identity or (kind is nn.Dropout and not module.training):
        hooks = module._forward_hooks or module._forward_pre_hooks
        if not (hooks or all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks):
            return x
    return cast(Tensor, module(x))


def _out_features(projection: Any) -> int:
    return int(getattr(getattr(projection, "base_layer", projection), "out_features", 0))


def _head_width(attention: Any, qkv: tuple[str, ...]) -> int:
    width, heads = _first(attention, _WIDTHS, None), _first(attention, _HEADS, None)
    if width is None and heads is not None:
        width = _out_features(getattr(attention, qkv[-1])) // heads // (3 if len(qkv) == 1 else 1)
    if not width:
        raise UnsupportedModelError("does not say how wide its heads are")
    return int(width)
