"""The grouping of a block's tokens: from the method, or from an earlier block or step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agglo.compiling import outside_graphs
from agglo.grouping import Grouping
from agglo.hosts.diffusers.state import AttentionStep, CurrentBlock, Kept, Pass, Run
from agglo.methods import Method, Outcome, View


def grouping_at(now: Pass, at: CurrentBlock, attention: Any, seen: Tensor) -> Grouping | None:
    """Return the grouping of a block's image tokens, decided once per pass; None where none of them merge.

    `seen` are the tokens (B, N, C) as the self-attention sees them.
    """
    if not at.decided:
        at.grouping = _decide(now, at, attention, seen)
        at.decided = True
    return at.grouping


def _decide(now: Pass, at: CurrentBlock, attention: Any, seen: Tensor) -> Grouping | None:
    plan = now.plan
    n_tokens = int(seen.shape[1])
    target = plan.target(n_tokens, at.grid)
    if target == n_tokens:
        return None
    shared = plan.config.share == "resolution"
    if shared and at.site.downsample in now.shared:
        grouping = now.shared[at.site.downsample]
    elif now.run is not None:
        grouping = _kept_or_new(now, now.run, at, attention, seen, target)
    else:
        grouping = _reduce(plan.method, _view(plan.method, at, attention, seen, target))
    if shared:
        now.shared[at.site.downsample] = grouping
    if now.traces:
        now.steps.append(AttentionStep(at.site.index, Outcome(grouping), grouping, at.site, at.grid))
    return grouping


def _reduce(method: Method, view: View) -> Grouping:
    with torch.no_grad():
        return method.reduce(view).grouping


@outside_graphs
def _kept_or_new(now: Pass, run: Run, at: CurrentBlock, attention: Any, seen: Tensor, target: int) -> Grouping:
    """Return an earlier grouping of this generation, while it is recent enough and its features have not drifted.

    Outside of compiled code, which would be compiled anew at every step.
    """
    config, method = now.plan.config, now.plan.method
    key = (at.site.downsample if config.share == "resolution" else at.site.index, run.call)
    kept = run.kept.get(key)
    is_old = kept is not None and config.every > 1 and run.step - kept.step >= config.every
    if is_old or (kept is not None and kept.grouping.labels.shape != seen.shape[:2]):
        kept = None
    if kept is not None and config.drift is None:
        return kept.grouping
    view = _view(method, at, attention, seen, target)
    features = None
    if config.drift is not None:
        features = view.features(getattr(method, "features", "tokens"))
        if kept is not None and kept.features is not None and drift(kept.features, features) <= config.drift:
            return kept.grouping
    grouping = _reduce(method, view)
    run.kept[key] = Kept(grouping, run.step, features)
    return grouping


def drift(before: Tensor, now: Tensor) -> float:
    """Return the relative change of features (B, N, D) in the image that changed most."""
    moved = (now.float() - before.float()).flatten(1).norm(dim=1)
    return float((moved / before.float().flatten(1).norm(dim=1).clamp(min=1e-12)).max())


def _view(method: Method, at: CurrentBlock, attention: Any, seen: Tensor, target: int) -> View:
    features = getattr(method, "features", None)
    with torch.no_grad():
        keys = _projected(attention, seen, "k") if features in ("keys", "keys_per_head") else None
        values = _projected(attention, seen, "v") if features == "values" else None
    return View(at.tokens, keys, values, target=target, grid=at.grid, training=attention.training)


def _projected(attention: Any, tokens: Tensor, which: str) -> Tensor:
    """Return keys ("k") or values ("v") (B, H, N, d) of tokens (B, N, C), keys normalised but not rotated."""
    if getattr(attention, "fused_projections", False) and hasattr(attention, "to_qkv"):
        result = attention.to_qkv(tokens).chunk(3, dim=-1)["qkv".index(which)]
    else:
        result = getattr(attention, f"to_{which}")(tokens)
    norm = getattr(attention, "norm_k", None) if which == "k" else None
    if norm is not None:
        shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
        if isinstance(shape, tuple) and int(shape[-1]) == result.shape[-1]:  # over all heads together
            result, norm = norm(result), None
    per_head: Tensor = result.unflatten(-1, (-1, attention.inner_dim // attention.heads))
    return (per_head if norm is None else norm(per_head)).transpose(1, 2)
