"""The classes that are swapped into self-attentions: their own, with one token per group going in.

Whatever processor is set runs as it is: it sees fewer tokens. Adapters on projections, slicing and fused projections
keep working.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.grouping import Grouping
from agglo.hosts.diffusion.groups import grouping_at
from agglo.hosts.diffusion.mixins import inside_block, plain_call
from agglo.hosts.diffusion.rotary import Ids, merged_table
from agglo.hosts.diffusion.sizes import call_with_sizes
from agglo.hosts.diffusion.state import THREAD, AtBlock, Pass, Site
from agglo.hosts.swap import ReducedModule

# Hooks of diffusers that keep an attention's output for later steps, when the groups may be others.
_CACHING_HOOKS = ("pyramid_attention_broadcast", "faster_cache_block", "taylorseer")


class ReducedAttention(ReducedModule):
    """Self-attention over image tokens alone."""

    @inside_block
    def __call__(self, now: Pass, at: AtBlock, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        _require_mergeable(self, args, kwargs)
        grouping = grouping_at(now, at, self, hidden_states)
        if grouping is None or "attn" not in now.plan.merge:
            return plain_call(self, hidden_states, *args, **kwargs)
        merged = grouping.merge(hidden_states, now.plan.mean)
        return grouping.unmerge(_attend(self, _sizes(now, grouping), merged, *args, **kwargs))


class ReducedRotaryAttention(ReducedModule):
    """Self-attention over the tokens of a video, which turns queries and keys by tables of all grid points."""

    @inside_block
    def __call__(
        self,
        now: Pass,
        at: AtBlock,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        name = "image_rotary_emb" if "image_rotary_emb" in kwargs else "rotary_emb"
        table = kwargs.pop("image_rotary_emb", rotary_emb)
        _require_mergeable(self, (None, attention_mask), kwargs)
        grouping = grouping_at(now, at, self, hidden_states)
        if grouping is None or "attn" not in now.plan.merge:
            return plain_call(self, hidden_states, None, attention_mask, **{name: table}, **kwargs)
        if table is not None:
            assert at.axes is not None
            table = _turned(table, at.axes, grouping)
        merged = grouping.merge(hidden_states, now.plan.mean)
        return grouping.unmerge(_attend(self, _sizes(now, grouping), merged, None, **{name: table}, **kwargs))


def _turned(table: tuple[Tensor, Tensor], axes: tuple[int, ...], grouping: Grouping) -> tuple[Tensor, Tensor]:
    """Tables (1, N, 1, D) or (B, N, D) of equal rows, for groups: (B, G, 1, D) or (B, G, D)."""
    flat = (table[0][0].flatten(1), table[1][0].flatten(1))  # (N, D): positions are the same for the whole batch
    cosine, sine = merged_table(flat, axes, grouping)
    return (cosine.unsqueeze(2), sine.unsqueeze(2)) if table[0].dim() == 4 else (cosine, sine)


class ReducedJointAttention(ReducedModule):
    """SD3's attention over an image stream and, in its first attention, a text stream that stays whole."""

    @inside_block
    def __call__(
        self,
        now: Pass,
        at: AtBlock,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        _require_mergeable(self, (None, attention_mask), kwargs)
        grouping = grouping_at(now, at, self, hidden_states)
        if grouping is None or "attn" not in now.plan.merge:
            return plain_call(self, hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        text = 0 if encoder_hidden_states is None else int(encoder_hidden_states.shape[1])
        merged, sizes = grouping.merge(hidden_states, now.plan.mean), _sizes(now, grouping, text_last=text)
        result = _attend(self, sizes, merged, encoder_hidden_states, **kwargs)
        if isinstance(result, tuple):
            return grouping.unmerge(result[0]), *result[1:]
        return grouping.unmerge(result)


class ReducedFluxAttention(ReducedModule):
    """Flux's attention: two streams, or one sequence with the text in front."""

    @inside_block
    def __call__(
        self,
        now: Pass,
        at: AtBlock,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        _require_mergeable(self, (None, attention_mask), kwargs)
        in_front, image = hidden_states[:, : at.text], hidden_states[:, at.text :]
        grouping = grouping_at(now, at, self, image)
        if grouping is None or "attn" not in now.plan.merge:
            return plain_call(self, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **kwargs)
        text = at.text if encoder_hidden_states is None else int(encoder_hidden_states.shape[1])
        merged = torch.cat([in_front, grouping.merge(image, now.plan.mean)], dim=1)
        sizes = _sizes(now, grouping, text_first=text)
        places: Ids = now.places
        batch = int(image.shape[0])
        # The processor takes one table for the whole batch, and every picture has its own groups.
        results = [
            _attend(
                self,
                *_of_picture((sizes, merged, encoder_hidden_states), picture, batch),
                image_rotary_emb=None if image_rotary_emb is None else table,
                **_of_picture(kwargs, picture, batch),
            )
            for picture, table in enumerate(places.tables(grouping))
        ]
        if not isinstance(results[0], tuple):
            whole = torch.cat(results)
            return torch.cat([whole[:, : at.text], grouping.unmerge(whole[:, at.text :])], dim=1)
        image_out, text_out, *others = (torch.cat(parts) for parts in zip(*results, strict=True))
        return grouping.unmerge(image_out), text_out, *(grouping.unmerge(other) for other in others)


def _of_picture(value: Any, picture: int, batch: int) -> Any:
    """One picture of everything that has one for each of the batch."""
    if isinstance(value, Tensor):
        return value[picture : picture + 1] if value.dim() > 1 and value.shape[0] == batch else value
    if isinstance(value, dict):
        return {key: _of_picture(part, picture, batch) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_of_picture(part, picture, batch) for part in value)
    return value


class ReducedMapAttention(ReducedModule):
    """Attention over a feature map (B, C, H, W), with its norm before it and its residual around it.

    The norm is over the whole map, so it comes before tokens merge; the residual is of the whole map, so it comes after
    they part. In between the processor sees an attention without either.
    """

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        site: Site | None = getattr(self, "agglo_site", None)
        if now is None or site is None or site.index not in now.plan.sites:
            return plain_call(self, hidden_states, *args, **kwargs)
        this: Any = self
        _require_mergeable(self, args, kwargs)
        entered = hidden_states.flatten(2)
        normed = entered if this.group_norm is None else this.group_norm(entered)
        seen = normed.transpose(1, 2).contiguous()
        at = AtBlock(site, entered.transpose(1, 2), (int(hidden_states.shape[-2]), int(hidden_states.shape[-1])))
        grouping = grouping_at(now, at, this, seen)
        if grouping is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        inner = _Bare(this)
        known = inspect.signature(this.processor.__call__).parameters  # as the attention's own forward filters them
        given = {name: value for name, value in kwargs.items() if name in known}
        out = _attend(inner, _sizes(now, grouping), grouping.merge(seen, now.plan.mean), **given)
        result = grouping.unmerge(out).transpose(1, 2).reshape(hidden_states.shape)
        result = result + hidden_states if this.residual_connection else result
        return result / this.rescale_output_factor


class _Bare:
    """An attention as its processor sees it, without norms over the map, residual and rescaling."""

    group_norm = None
    spatial_norm = None
    residual_connection = False
    rescale_output_factor = 1.0

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._attention.processor(self, *args, **kwargs)


def _sizes(now: Pass, grouping: Grouping, text_first: int = 0, text_last: int = 0) -> Tensor | None:
    """Sizes (B, K) of all keys, text tokens of size 1; None where they do not matter."""
    if not now.plan.proportional or grouping.chosen is not None:
        return None
    return F.pad(grouping.sizes, (text_first, text_last), value=1.0)


def _attend(attention: Any, sizes: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """Attention over merged tokens, weighed by their sizes if they are given."""
    call = attention if isinstance(attention, _Bare) else partial(plain_call, attention)
    return call(*args, **kwargs) if sizes is None else call_with_sizes(call, attention, sizes, *args, **kwargs)


def _require_mergeable(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """RuntimeError for what a merged attention cannot honour."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if mask is not None:
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
