"""The mixins of pipelines, denoisers, blocks and attentions: their own class, with another `__call__` in front.

`__call__` and not `forward`: hooks of accelerate and diffusers (offloading, casting) put a forward on the instance,
which Python finds before that of the class, but a call always goes to the class. Whatever attention processor is set
runs as it is, on fewer tokens.

A block or an attention that is called outside of a pass (of a model to which another thread applied a reduction in the
middle of its call) runs as it was. One that another thread releases in the middle of its call continues: the mixins of
attentions read nothing on the module that `agglo.remove` takes away.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from agglo.attention import proportional_attention
from agglo.grouping import Grouping
from agglo.hosts.common.base import bound_arguments
from agglo.hosts.common.swap import ReducedModule, StandIn, are_watched, begins_pass, original_class
from agglo.hosts.diffusers.state import (
    THREAD,
    Axes,
    CurrentBlock,
    DenoiserPass,
    DiffusionPlan,
    Site,
    generation,
    grouping_at,
    history_of,
)
from agglo.tracing import traces_of

Call = Callable[..., Any]
Table = tuple[Tensor, Tensor]  # cosines and sines of rotary position embeddings

# Hooks of diffusers that keep an attention's output for later steps, when the groups may be others.
_CACHING_HOOKS = ("pyramid_attention_broadcast", "faster_cache_block", "taylorseer")
# They add the mask they are given to the logits, without scaled_dot_product_attention.
_TAKE_A_MASK = ("AttnProcessor", "SlicedAttnProcessor", "XFormersAttnProcessor")
# Takes one too. On a CPU that is faster, since a mode watches every call of a torch function; on CUDA the mask must be
# aligned, as `proportional_attention` does it.
_COMMON = "AttnProcessor2_0"


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module as its library wrote it."""
    return nn.Module.__call__(module, *args, **kwargs)


class ReducedPipeline(ReducedModule):
    """A pipeline each of whose calls is a generation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with generation():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _EqualsOriginal(type):
    """The metaclass of a swapped class, which equals the original.

    Pipelines ask `type(unet) in (UNet2DConditionModel,)` before they take a model over from another pipeline.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__dict__.get("agglo_original")

    def __hash__(cls) -> int:
        original = cls.__dict__.get("agglo_original")
        return type.__hash__(cls) if original is None else hash(original)


class ReducedDenoiser(ReducedModule, metaclass=_EqualsOriginal):
    """A whole model each of whose calls is a pass, which its blocks find in the thread."""

    @begins_pass
    def __call__(self: Any, plan: DiffusionPlan, *args: Any, **kwargs: Any) -> Any:
        return _as_one_pass(self, plan, nn.Module.__call__, args, kwargs)

    @begins_pass
    def forward(self: Any, plan: DiffusionPlan, *args: Any, **kwargs: Any) -> Any:
        """Open a pass where `__call__` did not: torch.compile holds that of the class before `agglo.apply`."""
        original = original_class(self).forward
        if THREAD.current is not None and THREAD.current.model is self:
            return original(self, *args, **kwargs)
        return _as_one_pass(self, plan, original, args, kwargs)


def _as_one_pass(model: Any, plan: DiffusionPlan, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise RuntimeError(
            "gradient checkpointing runs blocks again outside of their model's call, where agglo cannot follow: call "
            "disable_gradient_checkpointing() on the model, or agglo.remove"
        )
    given = bound_arguments(original_class(model), args, kwargs)
    outlive = plan.config.every > 1 or plan.config.drift is not None
    history = history_of(model, plan, given.get("timestep")) if outlive else None
    now = DenoiserPass(model, plan, traces_of(model), given, plan.architecture.axes(model, given), history)
    before, THREAD.current = THREAD.current, now
    try:
        result = call(model, *args, **kwargs)
    finally:
        THREAD.current = before
    for trace in now.traces:
        trace.record(now.steps)
    return result


class ReducedBlock(ReducedModule):
    """A block, which puts itself and the tokens that enter it into the pass."""

    @begins_pass
    def __call__(self: Any, site: Site, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        if now is None or site.index not in now.plan.sites:
            return plain_call(self, hidden_states, *args, **kwargs)
        axes = now.plan.architecture.axes_at(now.axes, site, int(hidden_states.shape[1]))
        text = 0
        if hasattr(self, "proj_mlp"):  # Flux's single blocks put the text in front of the image
            text = int((kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[0]).shape[1])
        before, now.block = now.block, CurrentBlock(site, hidden_states, axes, text)
        try:
            return plain_call(self, hidden_states, *args, **kwargs)
        finally:
            now.block = before


class ReducedPart(ReducedModule):
    """A cross-attention or an MLP that runs with one token per group."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        grouping = None if now is None or now.block is None else now.block.grouping
        if now is None or grouping is None:
            return plain_call(self, hidden_states, *args, **kwargs)
        if grouping.labels.shape != hidden_states.shape[:2]:
            raise RuntimeError("feed-forward chunking gives an MLP other tokens than were grouped: leave 'mlp' out")
        if kwargs.get("ip_adapter_masks") is not None:
            raise RuntimeError("IP-Adapter masks say which pixels a query stands for: leave 'cross' out of merge=")
        return grouping.unmerge(plain_call(self, grouping.merge(hidden_states, now.plan.mean), *args, **kwargs))


class ReducedKeys(ReducedModule):
    """The linear layer of keys: where those of all tokens are known, their means are those of the merged tokens."""

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        block = None if now is None else now.block
        if block is None or block.grouping is None or block.keys is None or block.keys[0] is not self:
            return plain_call(self, tokens, *args, **kwargs)
        (_, keys), block.keys = block.keys, None
        fits = tokens.shape[:2] == block.grouping.sizes.shape
        if not fits or torch.is_grad_enabled() or are_watched([cast(nn.Module, self)]):
            return plain_call(self, tokens, *args, **kwargs)
        return block.grouping.merge(keys)


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
    """Self-attention over image tokens, or jointly over them and a text stream that stays whole.

    Video transformers rotate queries and keys by tables of all points of the grid.
    """

    @merging
    def __call__(
        self,
        now: DenoiserPass,
        grouping: Grouping,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        rotary_emb: Table | None = None,
        **kwargs: Any,
    ) -> Any:
        name = "image_rotary_emb" if "image_rotary_emb" in kwargs else "rotary_emb"
        table = kwargs.pop("image_rotary_emb", rotary_emb)
        if table is not None:
            assert now.block is not None
            assert now.block.axes is not None
            # Positions are the same for the whole batch: (1, N, 1, D) or equal rows (B, N, D).
            cosine, sine = merged_table((table[0][0].flatten(1), table[1][0].flatten(1)), now.block.axes, grouping)
            kwargs[name] = (cosine.unsqueeze(2), sine.unsqueeze(2)) if table[0].dim() == 4 else (cosine, sine)
        text = 0 if encoder_hidden_states is None else int(encoder_hidden_states.shape[1])
        merged, sizes = grouping.merge(hidden_states, now.plan.mean), _sizes(now, grouping, text_last=text)
        result = _attend(self, sizes, merged, encoder_hidden_states, **kwargs)
        if isinstance(result, tuple):
            return grouping.unmerge(result[0]), *result[1:]
        return grouping.unmerge(result)


def merged_table(table: Table, axes: Axes, grouping: Grouping) -> Table:
    """Return cosines and sines (B, G, D) of the groups, from those (N, D) of the grid points, last axis fastest.

    A group takes the mean position of its members. Angles are linear in the position, so the step of every channel
    along each axis is read off the table: the smallest one, since it is known up to whole turns only.
    """
    cosine, sine = (part.float() for part in table)
    angles = torch.atan2(sine, cosine)
    index = torch.arange(math.prod(axes), device=angles.device)
    strides = [math.prod(axes[axis + 1 :]) for axis in range(len(axes))]
    points = torch.stack([index // stride % length for stride, length in zip(strides, axes, strict=True)], -1)
    means = group_means(points, grouping)
    # From the nearest grid point on, whose angle is known, so that errors of a step do not add up along an axis.
    nearest = means.round()
    angle = angles[(nearest.long() * torch.tensor(strides, device=angles.device)).sum(dim=-1)]
    for axis, (stride, length) in enumerate(zip(strides, axes, strict=True)):
        if length > 1:
            turn = angles[stride] - angles[0]
            step = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
            angle = angle + (means - nearest)[..., axis : axis + 1] * step
    return angle.cos().to(table[0].dtype), angle.sin().to(table[1].dtype)


def group_means(points: Tensor, grouping: Grouping) -> Tensor:
    """Return the mean positions (B, G, A) of groups of tokens at points (N, A)."""
    return grouping.merge(points.float().expand(grouping.labels.shape[0], -1, -1).contiguous())


class ReducedFluxAttention(ReducedModule):
    """Flux's attention: two streams, or one sequence with the text in front.

    Its tables are computed from position ids, so the mean ids of the groups go through the model's own embedding.
    """

    @merging
    def __call__(
        self,
        now: DenoiserPass,
        grouping: Grouping,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: Table | None = None,
        **kwargs: Any,
    ) -> Any:
        assert now.block is not None
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
            for image, table in enumerate(flux_tables(now.model, now.given, grouping))
        ]
        if not isinstance(results[0], tuple):
            whole = torch.cat(results)
            return torch.cat([whole[:, :n_front], grouping.unmerge(whole[:, n_front:])], dim=1)
        image_out, text_out, *others = (torch.cat(parts) for parts in zip(*results, strict=True))
        return grouping.unmerge(image_out), text_out, *(grouping.unmerge(other) for other in others)


def flux_tables(model: Any, given: dict[str, Any], grouping: Grouping) -> list[Table]:
    """Return cosines and sines (T + G, D) for each image of the batch, text first, of Flux called with these ids."""
    text, image = (ids[0] if ids.dim() == 3 else ids for ids in (given["txt_ids"], given["img_ids"]))
    return [model.pos_embed(torch.cat([text.float(), mean])) for mean in group_means(image, grouping).unbind()]


def _image_of(value: Any, image: int, batch: int) -> Any:
    """Take one image of every tensor that has the batch as its first dimension."""

    def taken(part: Any) -> Any:
        batched = isinstance(part, Tensor) and part.dim() > 1 and part.shape[0] == batch
        return part[image : image + 1] if batched else part

    return tree_map(taken, value)


class ReducedMapAttention(ReducedModule):
    """Attention over a feature map (B, C, H, W), of which a norm before the merge and a residual after the unmerge.

    Both are of the whole map. In between the processor sees an attention without either.
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
        raise RuntimeError("an attention with an attention_mask cannot be reduced: a group has several tokens")
    hooks = getattr(getattr(attention, "_diffusers_hook", None), "hooks", {})
    caching = [name for name in hooks if any(part in name for part in _CACHING_HOOKS)]
    if caching:
        raise RuntimeError(
            f"diffusers' cache {caching[0]!r} keeps outputs for later steps, when tokens are grouped otherwise: call "
            "disable_cache() on the model, or agglo.remove"
        )


def _sizes(now: DenoiserPass, grouping: Grouping, text_first: int = 0, text_last: int = 0) -> Tensor | None:
    """Return the sizes (B, K) of all keys, text tokens of size 1; None where they do not matter."""
    if not now.plan.proportional or grouping.chosen is not None:
        return None
    return F.pad(grouping.sizes, (text_first, text_last), value=1.0)


def _attend(attention: Any, sizes: Tensor | None, tokens: Tensor, *args: Any, call: Any = None, **kwargs: Any) -> Any:
    """Run an attention over merged tokens, with log(size) on the logits of keys of sizes (B, K).

    A TorchFunctionMode gives calls of `scaled_dot_product_attention` the sizes, since some processors ignore a mask.
    The older ones that multiply matrices themselves get an additive mask. RuntimeError if neither happened.
    """
    call = call or partial(plain_call, attention)
    if sizes is None:
        return call(tokens, *args, **kwargs)
    processor = type(attention.processor).__name__
    if processor in _TAKE_A_MASK or (processor == _COMMON and tokens.device.type == "cpu"):
        return call(tokens, *args, **{**kwargs, "attention_mask": sizes.log().to(tokens.dtype).unsqueeze(1)})
    caught: list[bool] = []  # apart from the mode, on which torch.compile reads no attributes
    with _GiveSizes(sizes, caught):
        result = call(tokens, *args, **kwargs)
    if not caught:
        raise RuntimeError(
            f"{processor} cannot weigh groups by their sizes: it called no scaled_dot_product_attention over "
            f"{sizes.shape[0]} x {sizes.shape[1]} tokens. Use agglo.apply(..., proportional=False) with it"
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
