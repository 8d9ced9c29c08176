"""The mixins of self-attentions: their own class, with one token per group going in.

Whatever processor is set runs as it is: it sees fewer tokens. Adapters on projections, slicing and fused projections
keep working.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agglo.attention import proportional_attention
from agglo.grouping import Grouping
from agglo.hosts.common.swap import ReducedModule, StandIn, begins_pass
from agglo.hosts.diffusers.groups import grouping_at
from agglo.hosts.diffusers.passes import plain_call
from agglo.hosts.diffusers.rotary import merged_table
from agglo.hosts.diffusers.state import THREAD, CurrentBlock, Pass, Site

Call = Callable[..., Any]

# Hooks of diffusers that keep an attention's output for later steps, when the groups may be others.
_CACHING_HOOKS = ("pyramid_attention_broadcast", "faster_cache_block", "taylorseer")
# They add the mask they are given to the logits, without scaled_dot_product_attention.
_TAKE_A_MASK = ("AttnProcessor", "SlicedAttnProcessor", "XFormersAttnProcessor")


def merging(run: Call) -> Call:
    """Make the `__call__` of a self-attention from a function that also takes the pass and the grouping, after self.

    Outside of a block of a pass, and where nothing merges, the plain `__call__` runs.
    """

    def call(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        if now is None or now.block is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        _require_mergeable(self, args, kwargs)
        grouping = grouping_at(now, now.block, self, hidden_states[:, now.block.text :])
        if grouping is None or "attn" not in now.plan.config.merge:
            return plain_call(self, hidden_states, *args, **kwargs)
        return run(self, now, grouping, hidden_states, *args, **kwargs)

    return call


class ReducedAttention(ReducedModule):
    """Self-attention over image tokens, or jointly over them and a text stream that stays whole."""

    @merging
    def __call__(
        self,
        now: Pass,
        grouping: Grouping,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        **kwargs: Any,
    ) -> Any:
        text = 0 if encoder_hidden_states is None else int(encoder_hidden_states.shape[1])
        merged, sizes = grouping.merge(hidden_states, now.plan.mean), _sizes(now, grouping, text_last=text)
        result = _attend(self, sizes, merged, encoder_hidden_states, **kwargs)
        if isinstance(result, tuple):
            return grouping.unmerge(result[0]), *result[1:]
        return grouping.unmerge(result)


class ReducedRotaryAttention(ReducedModule):
    """Self-attention over the tokens of a video, which rotates queries and keys by tables of all grid points."""

    @merging
    def __call__(
        self,
        now: Pass,
        grouping: Grouping,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        name = "image_rotary_emb" if "image_rotary_emb" in kwargs else "rotary_emb"
        table = kwargs.pop("image_rotary_emb", rotary_emb)
        if table is not None:
            assert now.block is not None
            assert now.block.axes is not None
            # Positions are the same for the whole batch: (1, N, 1, D) or equal rows (B, N, D).
            cosine, sine = merged_table((table[0][0].flatten(1), table[1][0].flatten(1)), now.block.axes, grouping)
            table = (cosine.unsqueeze(2), sine.unsqueeze(2)) if table[0].dim() == 4 else (cosine, sine)
        merged = grouping.merge(hidden_states, now.plan.mean)
        return grouping.unmerge(_attend(self, _sizes(now, grouping), merged, None, **{name: table}, **kwargs))


class ReducedFluxAttention(ReducedModule):
    """Flux's attention: two streams, or one sequence with the text in front."""

    @merging
    def __call__(
        self,
        now: Pass,
        grouping: Grouping,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        assert now.block is not None
        assert now.ids is not None
        n_front, batch = now.block.text, int(hidden_states.shape[0])
        merged_image = grouping.merge(hidden_states[:, n_front:], now.plan.mean)
        merged = torch.cat([hidden_states[:, :n_front], merged_image], dim=1)
        text = n_front if encoder_hidden_states is None else int(encoder_hidden_states.shape[1])
        sizes = _sizes(now, grouping, text_first=text)
        # The processor takes one table for the whole batch, and every image has its own groups.
        results = [
            _attend(
                self,
                *_image_of((sizes, merged, encoder_hidden_states), image, batch),
                image_rotary_emb=None if image_rotary_emb is None else table,
                **_image_of(kwargs, image, batch),
            )
            for image, table in enumerate(now.ids.tables(grouping))
        ]
        if not isinstance(results[0], tuple):
            whole = torch.cat(results)
            return torch.cat([whole[:, :n_front], grouping.unmerge(whole[:, n_front:])], dim=1)
        image_out, text_out, *others = (torch.cat(parts) for parts in zip(*results, strict=True))
        return grouping.unmerge(image_out), text_out, *(grouping.unmerge(other) for other in others)


def _image_of(value: Any, image: int, batch: int) -> Any:
    """Take one image of every tensor that has the batch as its first dimension."""
    if isinstance(value, Tensor):
        return value[image : image + 1] if value.dim() > 1 and value.shape[0] == batch else value
    if isinstance(value, dict):
        return {key: _image_of(part, image, batch) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_image_of(part, image, batch) for part in value)
    return value


class ReducedMapAttention(ReducedModule):
    """Attention over a feature map (B, C, H, W), with its norm before it and its residual around it.

    The norm is over the whole map, so it comes before the merge; the residual is of the whole map, so it comes after
    the unmerge. In between the processor sees an attention without either.
    """

    @begins_pass
    def __call__(self: Any, site: Site, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        if now is None or site.index not in now.plan.sites:
            return plain_call(self, hidden_states, *args, **kwargs)
        _require_mergeable(self, args, kwargs)
        flat = hidden_states.flatten(2)
        normed = flat if self.group_norm is None else self.group_norm(flat)
        seen = normed.transpose(1, 2).contiguous()
        rows, columns = (int(length) for length in hidden_states.shape[-2:])
        grouping = grouping_at(now, CurrentBlock(site, flat.transpose(1, 2), (rows, columns)), self, seen)
        if grouping is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        known = inspect.signature(self.processor.__call__).parameters  # as the attention's own forward filters them
        given = {name: value for name, value in kwargs.items() if name in known}
        bare = StandIn(self, group_norm=None, spatial_norm=None, residual_connection=False, rescale_output_factor=1.0)
        call = partial(self.processor, bare)
        out = _attend(self, _sizes(now, grouping), grouping.merge(seen, now.plan.mean), call=call, **given)
        result = grouping.unmerge(out).transpose(1, 2).reshape(hidden_states.shape)
        result = result + hidden_states if self.residual_connection else result
        return result / self.rescale_output_factor


def _require_mergeable(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for an attention mask, and for caches of attention outputs."""
    if kwargs.get("attention_mask", args[1] if len(args) > 1 else None) is not None:
        raise RuntimeError(
            "this self-attention was given an attention_mask, which says which tokens may be seen, and a group has "
            "several: agglo cannot reduce it"
        )
    hooks = getattr(getattr(attention, "_diffusers_hook", None), "hooks", {})
    caching = [name for name in hooks if any(part in name for part in _CACHING_HOOKS)]
    if caching:
        raise RuntimeError(
            f"diffusers' cache {caching[0]!r} keeps outputs of this attention for later steps, when its tokens are "
            "grouped otherwise: disable_cache() on the model, or agglo.remove"
        )


def _sizes(now: Pass, grouping: Grouping, text_first: int = 0, text_last: int = 0) -> Tensor | None:
    """Return the sizes (B, K) of all keys, text tokens of size 1; None where they do not matter."""
    if not now.plan.proportional or grouping.chosen is not None:
        return None
    return F.pad(grouping.sizes, (text_first, text_last), value=1.0)


def _attend(attention: Any, sizes: Tensor | None, tokens: Tensor, *args: Any, call: Any = None, **kwargs: Any) -> Any:
    """Run an attention over merged tokens, with log(size) on the logits of keys of sizes (B, K).

    Processors that call `scaled_dot_product_attention` need not cooperate (some take a mask and ignore it): a
    TorchFunctionMode gives their call the sizes. The older ones that multiply matrices themselves get an additive mask,
    which they honour. If neither happened, RuntimeError: it would silently be another model.
    """
    call = call or partial(plain_call, attention)
    if sizes is None:
        return call(tokens, *args, **kwargs)
    processor = type(attention.processor).__name__
    if processor in _TAKE_A_MASK:
        return call(tokens, *args, **{**kwargs, "attention_mask": sizes.log().to(tokens.dtype).unsqueeze(1)})
    caught: list[bool] = []  # apart from the mode, on which torch.compile reads no attributes
    with _GiveSizes(sizes, caught):
        result = call(tokens, *args, **kwargs)
    if not caught:
        raise RuntimeError(
            f"{processor} attends in a way that cannot weigh groups by their sizes (one scaled_dot_product_attention "
            f"over {sizes.shape[0]} x {sizes.shape[1]} tokens was expected): use agglo.apply(..., proportional=False) "
            "with it"
        )
    return result


class _GiveSizes(TorchFunctionMode):
    """Make each plain self-attention over as many tokens as there are sizes proportional; others stay as they are."""

    def __init__(self, sizes: Tensor, caught: list[bool]) -> None:
        super().__init__()
        self.sizes, self.caught = sizes, caught

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, n_keys = given["query"], given["key"], self.sizes.shape[1]
        special = given.get("attn_mask") is not None or given.get("is_causal") or given.get("enable_gqa")
        if special or k.shape[0] != self.sizes.shape[0] or k.shape[-2] != n_keys or q.shape[-2] != n_keys:
            return func(*args, **kwargs)
        self.caught.append(True)
        dropout = given.get("dropout_p", 0.0)
        return proportional_attention(q, k, given["value"], self.sizes, scale=given.get("scale"), dropout=dropout)
