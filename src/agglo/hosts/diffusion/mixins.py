"""The classes that are swapped into a diffusion model: its own, with another `__call__` in front.

`__call__` and not `forward`: accelerate's and diffusers' hooks (offloading, casting) put a forward on the instance,
which Python finds before that of the class, but a call always goes to the class. So these work whichever came first,
and after `agglo.remove` nothing of ours is left inside somebody's wrapper.

A block or an attention that is called outside of a pass (of a model to which another thread applied a reduction in the
middle of its call) runs as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from agglo.grouping import Grouping
from agglo.hosts.diffusion.families import Family
from agglo.hosts.diffusion.groups import grouping_at
from agglo.hosts.diffusion.plan import Plan
from agglo.hosts.diffusion.rotary import Ids, merged_table
from agglo.hosts.diffusion.sizes import call_with_sizes
from agglo.hosts.diffusion.state import THREAD, AtBlock, Pass, Run, Site, generation
from agglo.hosts.swap import ReducedModule

Call = Callable[..., Any]

# Hooks of diffusers that keep an attention's output for later steps, when the groups may be others.
_CACHING_HOOKS = ("pyramid_attention_broadcast", "faster_cache_block", "taylorseer")


class ReducedPipeline(ReducedModule):
    """A pipeline: each call is a generation of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with generation():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class ReducedDenoiser(ReducedModule):
    """A whole model: each call is a pass.

    agglo_setup: all that apply decided, one immutable value.
    """

    agglo_setup: tuple[Plan, Family, dict[str, int]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return as_one_pass(self, super().__call__, args, kwargs)  # type: ignore[misc]


def with_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """The swapped class of a denoiser with a forward that is a pass too, for who calls it and not the model; with the
    signature of the original, which pipelines look at."""
    if "forward" not in vars(cls):
        original: Call = cls.forward

        @wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Without our class the model was released, and a hook still holds this function.
            if not isinstance(self, ReducedDenoiser) or (THREAD.current is not None and THREAD.current.owner is self):
                return original(self, *args, **kwargs)
            return as_one_pass(self, lambda *a, **k: original(self, *a, **k), args, kwargs)

        cls.forward = forward  # type: ignore[method-assign]
    return cls


def as_one_pass(model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a denoiser; its blocks find the pass in the thread."""
    setup = getattr(model, "agglo_setup", None)
    if setup is None:  # released by another thread a moment ago
        return call(*args, **kwargs)
    before = THREAD.current
    now = THREAD.current = _open(model, *setup, args, kwargs)
    try:
        result = call(*args, **kwargs)
    finally:
        THREAD.current = before
    for trace in now.traces:
        trace.record(now.steps)
    return result


def _open(
    model: Any, plan: Plan, family: Family, positions: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Pass:
    def argument(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = positions.get(name, len(args))
        return args[position] if position < len(args) else None

    if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise RuntimeError(
            "gradient checkpointing runs blocks a second time outside of their model's call, where agglo cannot follow: "
            "call disable_gradient_checkpointing() on the model, or agglo.remove"
        )
    run = _run(model, argument("timestep")) if plan.remembers else None
    trace = getattr(model, "agglo_trace", None)
    return Pass(
        owner=model,
        plan=plan,
        family=family,
        traces=() if trace is None else (trace,),
        axes=family.axes(model, argument),
        places=family.places(model, argument),
        run=run,
    )


@torch.compiler.disable
def _run(model: Any, timestep: Any) -> Run:
    if THREAD.generation is None:
        raise RuntimeError(
            "every= and drift= keep groupings from one denoising step to the next, and agglo cannot tell which calls of "
            "this model are steps of one generation: give agglo.apply the whole pipeline, or put the loop inside "
            "`with agglo.generation():`"
        )
    run = THREAD.generation.run(model)
    run.begin(timestep)
    return run


class ReducedBlock(ReducedModule):
    """A block: it says where the pass is, and shows the tokens that enter."""

    agglo_site: Site

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        if now is None or self.agglo_site.index not in now.plan.sites:
            return super().__call__(hidden_states, *args, **kwargs)  # type: ignore[misc]
        axes = now.family.axes_at(now.axes, self.agglo_site, int(hidden_states.shape[1]))
        text = 0
        if hasattr(self, "proj_mlp"):  # Flux's single blocks put the text in front of the image
            text = int((kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[0]).shape[1])
        before, now.block = now.block, AtBlock(self.agglo_site, hidden_states, axes, text)
        try:
            return super().__call__(hidden_states, *args, **kwargs)  # type: ignore[misc]
        finally:
            now.block = before


class ReducedPart(ReducedModule):
    """A part of a block that works with one token per group."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        call: Call = super().__call__  # type: ignore[misc]
        if now is None or now.block is None:
            return call(hidden_states, *args, **kwargs)
        return self.agglo_run(call, now, now.block, hidden_states, *args, **kwargs)

    def agglo_run(self, call: Call, now: Pass, at: AtBlock, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class ReducedCross(ReducedPart):
    """Cross-attention: one query per group."""

    def agglo_run(self, call: Call, now: Pass, at: AtBlock, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        grouping = _sharing(at.grouping, hidden_states, "cross-attention")
        if grouping is None:
            return call(hidden_states, *args, **kwargs)
        if kwargs.get("ip_adapter_masks") is not None:
            raise RuntimeError(
                "IP-Adapter masks say which pixels a query stands for, which a group does not: leave 'cross' out of "
                "merge="
            )
        return grouping.unmerge(call(grouping.merge(hidden_states), *args, **kwargs))


class ReducedMlp(ReducedPart):
    """The MLP: one token per group."""

    def agglo_run(self, call: Call, now: Pass, at: AtBlock, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        grouping = _sharing(at.grouping, hidden_states, "MLP")
        if grouping is None:
            return call(hidden_states, *args, **kwargs)
        return grouping.unmerge(call(grouping.merge(hidden_states), *args, **kwargs))


def _sharing(grouping: Grouping | None, hidden_states: Tensor, part: str) -> Grouping | None:
    """The grouping, if it is of these tokens; RuntimeError if they were split (feed-forward chunking)."""
    if grouping is not None and grouping.labels.shape != hidden_states.shape[:2]:
        raise RuntimeError(
            f"the {part} was called with {tuple(hidden_states.shape[:2])} tokens, where {tuple(grouping.labels.shape)} "
            "were grouped: feed-forward chunking and merge=('mlp',) do not go together"
        )
    return grouping


class ReducedAttention(ReducedPart):
    """Self-attention over image tokens alone."""

    def agglo_run(self, call: Call, now: Pass, at: AtBlock, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        _require_mergeable(self, args, kwargs)
        grouping = grouping_at(now, at, self, hidden_states)  # type: ignore[arg-type]
        if grouping is None or "attn" not in now.plan.merge:
            return call(hidden_states, *args, **kwargs)
        return grouping.unmerge(_attend(self, call, now, grouping, grouping.merge(hidden_states), *args, **kwargs))


class ReducedRotaryAttention(ReducedPart):
    """Self-attention over the tokens of a video, which turns queries and keys by tables of all grid points."""

    def agglo_run(
        self,
        call: Call,
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
        grouping = grouping_at(now, at, self, hidden_states)  # type: ignore[arg-type]
        if grouping is None or "attn" not in now.plan.merge:
            return call(hidden_states, None, attention_mask, **{name: table}, **kwargs)
        if table is not None:
            assert at.axes is not None
            table = _turned(table, at.axes, grouping)
        merged = grouping.merge(hidden_states)
        return grouping.unmerge(_attend(self, call, now, grouping, merged, None, **{name: table}, **kwargs))


def _turned(table: tuple[Tensor, Tensor], axes: tuple[int, ...], grouping: Grouping) -> tuple[Tensor, Tensor]:
    """Tables (1, N, 1, D) or (B, N, D) of equal rows, for groups: (B, G, 1, D) or (B, G, D)."""
    flat = (table[0][0].flatten(1), table[1][0].flatten(1))  # (N, D): positions are the same for the whole batch
    cosine, sine = merged_table(flat, axes, grouping)
    return (cosine.unsqueeze(2), sine.unsqueeze(2)) if table[0].dim() == 4 else (cosine, sine)


class ReducedJointAttention(ReducedPart):
    """SD3's attention over an image stream and, in its first attention, a text stream that stays whole."""

    def agglo_run(
        self,
        call: Call,
        now: Pass,
        at: AtBlock,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        _require_mergeable(self, (None, attention_mask), kwargs)
        grouping = grouping_at(now, at, self, hidden_states)  # type: ignore[arg-type]
        if grouping is None or "attn" not in now.plan.merge:
            return call(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        text = 0 if encoder_hidden_states is None else int(encoder_hidden_states.shape[1])
        merged = grouping.merge(hidden_states)
        result = _attend(self, call, now, grouping, merged, encoder_hidden_states, text_last=text, **kwargs)
        if isinstance(result, tuple):
            return grouping.unmerge(result[0]), *result[1:]
        return grouping.unmerge(result)


class ReducedFluxAttention(ReducedPart):
    """Flux's attention: two streams, or one sequence with the text in front."""

    def agglo_run(
        self,
        call: Call,
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
        grouping = grouping_at(now, at, self, image)  # type: ignore[arg-type]
        if grouping is None or "attn" not in now.plan.merge:
            return call(hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **kwargs)
        text = at.text if encoder_hidden_states is None else int(encoder_hidden_states.shape[1])
        merged = torch.cat([in_front, grouping.merge(image)], dim=1)
        places: Ids = now.places
        # The processor takes one table for the whole batch, and every picture has its own groups.
        results = [
            _attend(
                self,
                call,
                now,
                _of_picture(grouping, picture),
                *_of_picture((merged, encoder_hidden_states), picture),
                text_first=text,
                image_rotary_emb=None if image_rotary_emb is None else table,
                **_of_picture(kwargs, picture),
            )
            for picture, table in enumerate(places.tables(grouping))
        ]
        if not isinstance(results[0], tuple):
            whole = torch.cat(results)
            return torch.cat([whole[:, : at.text], grouping.unmerge(whole[:, at.text :])], dim=1)
        image_out, text_out, *others = (torch.cat(parts) for parts in zip(*results, strict=True))
        return grouping.unmerge(image_out), text_out, *(grouping.unmerge(other) for other in others)


def _of_picture(value: Any, picture: int) -> Any:
    """One picture of everything that has a batch dimension."""
    if isinstance(value, Tensor):
        return value[picture : picture + 1] if value.dim() > 1 else value
    if isinstance(value, Grouping):
        return Grouping(*(_of_picture(part, picture) for part in (value.labels, value.sizes)), drops=value.drops)
    if isinstance(value, dict):
        return {key: _of_picture(part, picture) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_of_picture(part, picture) for part in value)
    return value


class ReducedMapAttention(ReducedModule):
    """Attention over a feature map (B, C, H, W), with its norm before it and its residual around it.

    The norm is over the whole map, so it comes before tokens merge; the residual is of the whole map, so it comes after
    they part. In between the processor sees an attention without either.
    """

    agglo_site: Site

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = THREAD.current
        call: Call = super().__call__  # type: ignore[misc]
        if now is None or self.agglo_site.index not in now.plan.sites or hidden_states.dim() != 4:
            return call(hidden_states, *args, **kwargs)
        this: Any = self
        _require_mergeable(self, args, kwargs)
        height, width = hidden_states.shape[-2:]
        entered = hidden_states.flatten(2)
        normed = entered if this.group_norm is None else this.group_norm(entered)
        seen = normed.transpose(1, 2)
        at = AtBlock(self.agglo_site, entered.transpose(1, 2), (int(height), int(width)))
        grouping = grouping_at(now, at, this, seen)
        if grouping is None:
            return call(hidden_states, *args, **kwargs)
        inner = _Bare(this)
        merged = grouping.merge(seen.contiguous())
        out = _attend(this, lambda *a, **k: this.processor(inner, *a, **k), now, grouping, merged)
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


def _attend(
    attention: Any,
    call: Call,
    now: Pass,
    grouping: Grouping,
    *args: Any,
    text_first: int = 0,
    text_last: int = 0,
    **kwargs: Any,
) -> Any:
    """Attention over merged tokens, with their sizes where the plan says so; text tokens are of size 1."""
    if not now.plan.proportional or grouping.chosen is not None:
        return call(*args, **kwargs)
    sizes = grouping.sizes
    if text_first or text_last:
        sizes = torch.nn.functional.pad(sizes, (text_first, text_last), value=1.0)
    return call_with_sizes(call, attention, sizes, *args, **kwargs)


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
