"""How a layer of transformers' vision models comes apart, told by what it has and not by its class.

Its families copy one pre-norm layer under different names: norms, q, k, v projections or a fused one, output
projection, MLP, and on both branches any of dropout, LayerScale, gates and stochastic depth. `Structure.of` finds the
names. What a layer does with them is then proved by running it (`probe.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from agglo.hosts.common.base import matrix_entries
from agglo.hosts.common.blocks import Parts, Projected, front_and_rest
from agglo.hosts.common.readers import is_plain_linear

_NORMS = (
    ("layernorm_before", "layernorm_after"),
    ("layer_norm1", "layer_norm2"),
    ("norm1", "norm2"),
    ("rms_norm1", "rms_norm2"),
    ("input_layernorm", "post_attention_layernorm"),
    ("attention_norm", "ffn_norm"),
)
_ATTENTIONS = ("self_attn", "attention.attention", "attention", "attn")
_QKV = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("qkv",))
_OUTPUTS = ("o_proj", "out_proj", "projection_layer", "projection", "proj")
_MLPS = ("mlp", "ffn", "feed_forward")
_SCALES = (("layer_scale1", "layer_scale2"), ("lambda_1", "lambda_2"), ("ls1", "ls2"))
_DROP_PATHS = (("drop_path", "drop_path"), ("drop_path1", "drop_path2"))
_GATES = (("gate_attn", "gate_ffn"),)
_DROPOUTS = ("attention_dropout", "dropout_prob", "attn_drop", "dropout")
_WIDTHS = ("head_dim", "attention_head_size")
_HEADS = ("num_heads", "num_attention_heads")
_EXPERTS = "dataset_index"  # ViTPose tells every image's expert by this argument


@dataclass(frozen=True)
class Structure:
    """The names under which a layer has its parts; dotted where they are nested.

    Args:
        output: Of attention: a linear layer, or a module that may be given the layer's input too (`output_takes_both`).
        mlp: One module, or two; the second may add the residual itself (`mlp_adds`).
        scales: LayerScale of both branches, modules or vectors.
        gates: Vectors whose tanh scales the branches.
        drops: Which branches the layer's own dropout acts on.
    """

    norms: tuple[str, str]
    attention: str
    qkv: tuple[str, ...]
    output: str
    output_takes_both: bool
    mlp: tuple[str, ...]
    mlp_adds: bool
    scales: tuple[str, str] | None
    gates: tuple[str, str] | None
    drop_paths: tuple[str, str] | None
    drops: tuple[bool, bool]
    head_width: int

    @staticmethod
    def of(layer: nn.Module) -> Structure | str:
        """Return what a layer has, or what it lacks as the end of a sentence."""
        norms = _pair(layer, _NORMS)
        if norms is None:
            return "has no two norms, before attention and MLP"
        candidates = [(path, names) for path in _ATTENTIONS for names in _QKV if _has(get(layer, path), *names)]
        if not candidates:
            return "has no attention with projections to q, k and v"
        attention, qkv = candidates[0]
        inner, outer = get(layer, attention), attention.split(".")[0]
        outputs = [f"{attention}.{name}" for name in _OUTPUTS if _has(inner, name)]
        outputs += [f"{outer}.output"] if _has(get(layer, outer), "output") else []
        if not outputs:
            return "has no output projection"
        mlp: tuple[str, ...] = tuple(name for name in _MLPS if _has(layer, name))[:1]
        if not mlp and _has(layer, "intermediate", "output"):
            mlp = ("intermediate", "output")
        if not mlp:
            return "has no MLP"
        width = _head_width(inner, qkv)
        if width is None:
            return "does not say how wide its heads are"
        has_dropout = _has(layer, "dropout")
        return Structure(
            norms=norms,
            attention=attention,
            qkv=qkv,
            output=outputs[0],
            output_takes_both=outputs[0].endswith(".output") and _arguments(get(layer, outputs[0])) > 1,
            mlp=mlp,
            mlp_adds=len(mlp) == 2 and _arguments(layer.output) > 1,
            scales=_pair(layer, _SCALES),
            gates=_pair(layer, _GATES),
            drop_paths=_pair(layer, _DROP_PATHS),
            # Where attention ends with a dropout of its own, that of the layer is for the MLP.
            drops=(has_dropout and not _has(inner, "projection_dropout"), has_dropout),
            head_width=width,
        )

    def weights(self, layer: nn.Module) -> tuple[int, int, int, int]:
        """Return matrix entries of attention, those of its query side, those of the MLP; and heads."""
        attention = get(layer, self.attention)
        projections = [getattr(attention, name) for name in self.qkv]
        output, qkv = matrix_entries(get(layer, self.output)), matrix_entries(*projections)
        if len(projections) == 3:
            q = matrix_entries(projections[0])
        else:  # a fused projection is a third each, unless an adapter or quantisation hides its rows
            q = qkv // 3 if is_plain_linear(projections[0]) else 0
        base = getattr(projections[0], "base_layer", projections[0])
        n_inputs = int(getattr(base, "in_features", 0))
        heads = qkv // (3 * n_inputs) // self.head_width if n_inputs else 0
        return qkv + output, q + output, matrix_entries(*(getattr(layer, name) for name in self.mlp)), heads


@dataclass(frozen=True)
class LayerParts(Parts):
    """A layer of a known structure, and what the library hands it beside the tokens."""

    structure: Structure
    given: Mapping[str, Any]

    @property
    def treats_images_alike(self) -> bool:  # type: ignore[override]
        return not any(isinstance(value, Tensor) for value in self.given.values())

    @property
    def needs_all_tokens(self) -> bool:  # type: ignore[override]
        return any(isinstance(value, (Tensor, tuple, list)) for value in self.given.values())

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        # Not by calling the block: transformers hangs hooks on it that would collect merged tokens as hidden states,
        # and it would do its own gradient checkpointing inside of ours.
        out = block.forward(x, **self.given)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        x = getattr(block, self.structure.norms[0])(x)
        attention = get(block, self.structure.attention)
        rotates = rotary is not None or hasattr(attention, "apply_rotary_embeddings")
        q, k, v = self._qkv(attention, x, None if rotates else n_front)  # the first tokens may be rotated too
        features = k
        if rotates:
            q, k = _rotated(attention, q, rotary), _rotated(attention, k, rotary)
        return Projected(
            q,
            k,
            v,
            features=features,
            scale=_first(attention, ("scaling", "scale"), None),
            dropout=_probability(_first(attention, _DROPOUTS, 0.0)) if attention.training else 0.0,
        )

    def _qkv(self, attention: Any, x: Tensor, n_front: int | None) -> tuple[Tensor, Tensor, Tensor]:
        names, width = self.structure.qkv, self.structure.head_width
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

        def heads(x: Tensor, norm: Any = None) -> Tensor:
            each_head = _is_of(norm, width) and not _is_of(norm, x.shape[-1])
            x = norm(x) if norm is not None and not each_head else x
            x = x.unflatten(-1, (-1, width)).transpose(1, 2)
            return cast(Tensor, norm(x)) if each_head else x

        front = x if n_front is None else x[:, :n_front]
        if len(names) == 3:
            q, k, v = (getattr(attention, name)(tokens) for name, tokens in zip(names, (front, x, x), strict=True))
        elif n_front is not None and is_plain_linear(fused := attention.qkv):
            q, rest = front_and_rest(x, fused.weight, fused.bias, n_front)
            k, v = rest.chunk(2, dim=-1)
        else:
            q, k, v = attention.qkv(x).chunk(3, dim=-1)
            q = q if n_front is None else q[:, :n_front]
        return heads(q, norms[0]), heads(k, norms[1]), heads(v)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        attended = attended.transpose(1, 2).flatten(2)
        output = get(block, self.structure.output)
        out = output(attended, x) if self.structure.output_takes_both else output(attended)
        attention = get(block, self.structure.attention)
        if hasattr(attention, "projection_dropout"):
            out = attention.projection_dropout(out)
        return x + self._branch(block, out, 0)

    def feed(self, block: Any, x: Tensor) -> Tensor:
        structure = self.structure
        normed = getattr(block, structure.norms[1])(x)
        if len(structure.mlp) == 2:
            hidden = getattr(block, structure.mlp[0])(normed)
            last = getattr(block, structure.mlp[1])
            return cast(Tensor, last(hidden, x)) if structure.mlp_adds else x + self._branch(block, last(hidden), 1)
        experts = {"indices": self.given[_EXPERTS]} if getattr(block, "num_experts", 1) > 1 else {}
        return x + self._branch(block, getattr(block, structure.mlp[0])(normed, **experts), 1)

    def _branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        """Return what attention (which = 0) or the MLP (1) gave, as it is added to the tokens (B, T, C)."""
        structure = self.structure
        if structure.drops[which]:
            out = block.dropout(out)
        if structure.scales is not None:
            scale = getattr(block, structure.scales[which])
            out = scale(out) if isinstance(scale, nn.Module) else scale * out
        if structure.gates is not None:
            out = getattr(block, structure.gates[which]).tanh() * out
        return out if structure.drop_paths is None else getattr(block, structure.drop_paths[which])(out)


class MessageParts(LayerParts):
    """X-CLIP's layer: a message token, made of the class tokens of all frames, has key and value but no query."""

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        options = {name: value for name, value in self.given.items() if name != "attention_mask"}
        message = block.message_fc(x[:, 0]).unflatten(0, (-1, block.num_frames))
        message = message + block.drop_path(block.message_attn(block.message_ln(message), **options)[0])
        tokens = torch.cat([x, message.reshape(len(x), 1, -1)], dim=1)
        projected = super().project(block, tokens, rotary, n_front)
        n_queries = x.shape[1] if n_front is None else n_front
        keys = projected.k[:, :, : x.shape[1]]
        return replace(projected, q=projected.q[:, :, :n_queries], features=keys)

    def _branch(self, block: Any, out: Tensor, which: int) -> Tensor:
        return out  # its stochastic depth is of the message alone

    @property
    def treats_images_alike(self) -> bool:  # type: ignore[override]
        return False


def parts_for(layer: nn.Module, structure: Structure, given: Mapping[str, Any]) -> LayerParts:
    """Return how a layer of a known structure comes apart."""
    return (MessageParts if hasattr(layer, "message_attn") else LayerParts)(structure, given)


def _arguments(module: Any) -> int:
    return len(inspect.signature(module.forward).parameters)


def get(module: Any, path: str) -> Any:
    """Return a nested attribute, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _has(owner: Any, *names: str) -> bool:
    return all(isinstance(getattr(owner, name, None), nn.Module) for name in names)


def _pair(layer: nn.Module, pairs: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    """Return the first two names under which a layer has something."""
    return next((pair for pair in pairs if all(getattr(layer, name, None) is not None for name in pair)), None)


def _first(module: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the attribute under the first name the module has."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), default)


def _probability(dropout: Any) -> float:
    return float(dropout.p if isinstance(dropout, nn.Dropout) else dropout)


def _is_of(norm: Any, width: int) -> bool:
    """Return whether a norm acts on so many channels."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.shape[-1] == width


def _head_width(attention: Any, qkv: tuple[str, ...]) -> int | None:
    width, heads = _first(attention, _WIDTHS, None), _first(attention, _HEADS, None)
    if width is None and heads is not None:
        total = getattr(getattr(attention, qkv[-1]), "out_features", None)
        width = None if total is None else total // heads // (3 if len(qkv) == 1 else 1)
    return width


def _rotated(attention: Any, x: Tensor, table: Tensor | None) -> Tensor:
    """Rotate x (B, H, T, d) by a table of sines and cosines (..., n, 2d) of its last n tokens.

    Where the library computes the rotation, it gets positions (B, T, 3), or those of a whole grid if there are none.
    """
    if hasattr(attention, "apply_rotary_embeddings"):
        if table is None:
            positions = attention.get_position_ids(x.transpose(1, 2))
        else:
            positions = tuple(axis.unsqueeze(1).to(x.dtype) for axis in table.unbind(dim=-1))
        return cast(Tensor, attention.apply_rotary_embeddings(x, positions))
    assert table is not None
    front = x.shape[2] - table.shape[-2]
    sine, cosine = table.chunk(2, dim=-1)
    here = x[:, :, front:]
    first, second = here.chunk(2, dim=-1)
    turned = (here * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)
    return torch.cat([x[:, :, :front], turned], dim=2) if front else turned
