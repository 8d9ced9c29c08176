"""Which tokens of a self-attention are one group: asked of the method, or known from a block or a step before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.hosts.diffusion.graphs import outside_graphs
from agglo.hosts.diffusion.state import AtBlock, AttentionStep, Kept, Pass, Run
from agglo.methods import Method, Outcome, View
from agglo.methods.helpers.features import patch_features


def grouping_at(now: Pass, at: AtBlock, attention: Any, seen: Tensor) -> Grouping | None:
    """The grouping of the image tokens of a block, decided once per pass; None where none of them merge.

    seen: (B, N, C), the tokens as its self-attention sees them.
    """
    if not at.decided:
        at.grouping = _decided(now, at, attention, seen)
        at.decided = True
    return at.grouping


def _decided(now: Pass, at: AtBlock, attention: Any, seen: Tensor) -> Grouping | None:
    plan = now.plan
    n_tokens = int(seen.shape[1])
    target = plan.target(n_tokens, at.grid)
    if target == n_tokens:
        return None
    shared = plan.share == "resolution"
    if shared and at.site.downsample in now.shared:
        grouping = now.shared[at.site.downsample]
    elif now.run is not None:
        grouping = _kept_or_new(now, now.run, at, attention, seen, target)
    else:
        grouping = _asked(plan.method, _view(plan.method, at, attention, seen, target))
    if shared:
        now.shared[at.site.downsample] = grouping
    if now.traces:
        now.steps.append(AttentionStep(at.site.index, Outcome(grouping), grouping, at.site, at.grid))
    return grouping


def _asked(method: Method, view: View) -> Grouping:
    with torch.no_grad():
        return method.reduce(view).grouping


@outside_graphs
def _kept_or_new(now: Pass, run: Run, at: AtBlock, attention: Any, seen: Tensor, target: int) -> Grouping:
    """A grouping that this generation made before, while it is young enough and its features have not drifted.

    Outside of compiled code, which would be compiled anew at every step.
    """
    plan, method = now.plan, now.plan.method
    key = (at.site.downsample if plan.share == "resolution" else at.site.index, run.call)
    kept = run.kept.get(key)
    if kept is not None and kept.grouping.labels.shape != seen.shape[:2]:
        kept = None
    if kept is not None and plan.every > 1 and run.step - kept.step >= plan.every:
        kept = None
    if kept is not None and plan.drift is None:
        return kept.grouping
    view = _view(method, at, attention, seen, target)
    features = None
    if plan.drift is not None:
        features = _compared(method, view)
        if kept is not None and kept.features is not None and drift(kept.features, features) <= plan.drift:
            return kept.grouping
    grouping = _asked(method, view)
    run.kept[key] = Kept(grouping, run.step, features)
    return grouping


def drift(before: Tensor, now: Tensor) -> float:
    """How far features (B, N, D) have moved, relative to what they were, in the picture that moved most."""
    moved = (now.float() - before.float()).flatten(1).norm(dim=1)
    return float((moved / before.float().flatten(1).norm(dim=1).clamp(min=1e-12)).max())


def _compared(method: Method, view: View) -> Tensor:
    """The features (B, N, D) that the method looks at, or the tokens if it looks at none."""
    return patch_features(view, getattr(method, "features", "tokens"))


def _view(method: Method, at: AtBlock, attention: Any, seen: Tensor, target: int) -> View:
    features = getattr(method, "features", None)
    with torch.no_grad():
        keys = projected(attention, seen, "k") if features in ("keys", "keys_per_head") else None
        values = projected(attention, seen, "v") if features == "values" else None
    return View.of_patches(at.tokens, target, at.grid, attention.training, keys, values)


def projected(attention: Any, tokens: Tensor, which: str) -> Tensor:
    """Keys ("k") or values ("v") (B, H, N, d) of tokens (B, N, C), keys normalised but not rotated."""
    if getattr(attention, "fused_projections", False) and hasattr(attention, "to_qkv"):
        _, keys, values = attention.to_qkv(tokens).chunk(3, dim=-1)
        result = keys if which == "k" else values
    else:
        result = attention.to_k(tokens) if which == "k" else attention.to_v(tokens)
    head_width = attention.inner_dim // attention.heads
    norm = getattr(attention, "norm_k", None) if which == "k" else None
    if norm is not None and _width(norm) == result.shape[-1]:
        result, norm = norm(result), None
    per_head: Tensor = result.unflatten(-1, (-1, head_width))
    return (per_head if norm is None else norm(per_head)).transpose(1, 2)


def _width(norm: Any) -> int | None:
    """Channels that a norm acts on together; None if it takes any number."""
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    return int(shape[-1]) if isinstance(shape, tuple) else None  # torch.Size is a tuple
