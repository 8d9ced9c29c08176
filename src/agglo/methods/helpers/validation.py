"""The rules that every outcome of a method must keep.

Shapes, dtypes and counts cost nothing and are checked on every pass. The values of labels have to be read off the
device: they are checked the first time that a method reduces so many tokens at a stage, and always under AGGLO_DEBUG=1;
never while a graph is compiled, traced or captured, which reading would break.
"""

from __future__ import annotations

import os
import weakref

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods.base import Method, Outcome, View

Situation = tuple[int, int, int]  # stage, tokens before, groups after

_seen: dict[int, set[Situation]] = {}


def require_valid(method: Method, view: View, outcome: Outcome) -> None:
    """Raise ValueError or TypeError that names the method and the rule its outcome breaks."""
    if torch.jit.is_tracing():  # sizes are tensors there
        return
    _require_shapes(method, view, outcome)
    _require_count(method, view, outcome)
    debug = os.environ.get("AGGLO_DEBUG", "0") not in ("", "0")
    if _is_readable(outcome.grouping.labels) and (debug or _is_new(method, view, outcome.grouping)):
        _require_labels(method, view, outcome)


def _require_shapes(method: Method, view: View, outcome: Outcome) -> None:
    if not isinstance(outcome, Outcome) or not isinstance(outcome.grouping, Grouping):
        raise TypeError(f"method {method.name!r} must return an Outcome of a Grouping, not {outcome!r}")
    batch, n_tokens, width = view.tokens.shape
    grouping, n_groups = outcome.grouping, outcome.grouping.n_groups
    if grouping.prefix != view.prefix:
        _refuse(method, view, f"the grouping's prefix must be view.prefix = {view.prefix}, not {grouping.prefix}")
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...], bool]] = {
        "grouping.labels": (grouping.labels, (batch, n_tokens), False),
        "grouping.sizes": (grouping.sizes, (batch, n_groups), True),
        "grouping.weights": (grouping.weights, (batch, n_tokens), True),
        "grouping.counts": (grouping.counts, (batch,), False),
        "grouping.chosen": (grouping.chosen, (batch, n_groups), False),
        "tokens": (outcome.tokens, (batch, n_groups, width), True),
        "policy": (outcome.policy, (batch, n_groups), True),
        "processed": (outcome.processed, (batch, n_groups), True),
        "weights": (outcome.weights, (batch, n_groups - view.prefix, n_tokens - view.prefix), True),
        "loss": (outcome.loss, (), True),
    }
    for name, (tensor, shape, real) in wanted.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            _refuse(method, view, f"{name} must have the shape {shape}, not {tuple(tensor.shape)}")
        if not (tensor.is_floating_point() if real else tensor.dtype == torch.int64):
            _refuse(method, view, f"{name} must be {'floating point' if real else 'int64'}, not {tensor.dtype}")


def _require_count(method: Method, view: View, outcome: Outcome) -> None:
    """Require as many groups as `stages` promised, which is what is reported. Behind a mask all tokens may stay."""
    if view.target is None or outcome.policy is not None or outcome.processed is not None:
        return
    left = outcome.grouping.n_groups - view.prefix
    if method.varies == "no" and left != view.target:
        hint = "A method that cannot leave as many says so in reachable() or stages(), or by `varies`"
        _refuse(method, view, f"view.target = {view.target} patch tokens must be left, not {left}. {hint}")
    if method.varies == "at_most" and left > view.target:
        _refuse(method, view, f"at most view.target = {view.target} patch tokens may be left, not {left}")


def _require_labels(method: Method, view: View, outcome: Outcome) -> None:
    grouping, prefix, n_groups = outcome.grouping, view.prefix, outcome.grouping.n_groups
    if not view.tokens.isfinite().all():
        return  # NaN in a model means NaN out of it, and labels without meaning
    labels, patches = grouping.labels, grouping.labels[:, prefix:]
    if not (labels[:, :prefix] == torch.arange(prefix, device=labels.device)).all():
        found = labels[0, :prefix].tolist()
        _refuse(method, view, f"the {prefix} prefix tokens must be groups 0 to {prefix - 1}, not {found}")
    strange = (patches < prefix) | (patches >= n_groups)
    strange &= ~((patches == -1) & torch.tensor(grouping.drops, device=labels.device))
    if strange.any():
        label = int(patches[strange][0])
        dropped = ", or -1" if grouping.drops else "; -1 drops a token, in a grouping with drops=True"
        hint = "Grouping.of counts prefix tokens by itself"
        _refuse(method, view, f"patch labels must be from {prefix} to {n_groups - 1}{dropped}: one is {label}. {hint}")
    if outcome.weights is None:
        _require_members(method, view, grouping)


def _require_members(method: Method, view: View, grouping: Grouping) -> None:
    """Require a token in every group but those of size 0, which pad."""
    labels = torch.where(grouping.labels < 0, grouping.n_groups, grouping.labels)
    members = torch.zeros(len(labels), grouping.n_groups + 1, device=labels.device)
    members = members.scatter_add(1, labels, torch.ones_like(labels, dtype=members.dtype))[:, :-1]
    empty = (members == 0) & ((grouping.sizes > 0) if grouping.counts is not None else True)
    if empty.any():
        image, group = (int(index) for index in empty.nonzero()[0])
        _refuse(method, view, f"every group must have a token: of image {image}, group {group} has none")
    if grouping.chosen is not None:
        own = grouping.labels.gather(1, grouping.chosen) == torch.arange(grouping.n_groups, device=labels.device)
        if not (own | (grouping.sizes == 0)).all():
            _refuse(method, view, "the token that is chosen for a group must be one of its members")


def _refuse(method: Method, view: View, rule: str) -> None:
    raise ValueError(f"method {method.name!r} breaks a rule at stage {view.stage}: {rule}")


def _is_readable(labels: Tensor) -> bool:
    """Return whether there are values, and no graph is in the making that reading would break."""
    plain = type(labels) is Tensor and labels.device.type != "meta" and not torch.compiler.is_compiling()
    return plain and not (labels.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_new(method: Method, view: View, grouping: Grouping) -> bool:
    """Return whether this instance never made so many groups of so many tokens at this stage."""
    key = id(method)
    if key not in _seen:
        _seen[key] = set()
        weakref.finalize(method, _seen.pop, key, None)
    situation = (view.stage, int(view.tokens.shape[1]), grouping.n_groups)
    if situation in _seen[key]:
        return False
    _seen[key].add(situation)
    return True
