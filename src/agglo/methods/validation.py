"""The rules that every outcome of a method must keep.

They are checked the first time that a method reduces so many tokens at a stage: to read the values of labels off the
device takes time. Never while a graph is compiled, traced or captured, which reading would break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from agglo.methods.base import Method, Outcome, View


def is_readable(labels: Tensor) -> bool:
    """Return whether there are values, and no graph is in the making that reading would break."""
    plain = type(labels) is Tensor and labels.device.type != "meta"
    return plain and not (labels.is_cuda and torch.cuda.is_current_stream_capturing())


def require_valid(method: Method, view: View, outcome: Outcome) -> None:
    """Raise ValueError that names the method and the rule its outcome breaks."""
    rule = _broken_shape(view, outcome) or _broken_count(method, view, outcome) or _broken_label(view, outcome)
    if rule is not None:
        raise ValueError(f"method {method.name!r} breaks a rule at stage {view.stage}: {rule}")


def _broken_shape(view: View, outcome: Outcome) -> str | None:
    batch, n_tokens, width = view.tokens.shape
    grouping, n_groups = outcome.grouping, outcome.grouping.n_groups
    if grouping.prefix != view.prefix:
        return f"the grouping's prefix must be view.prefix = {view.prefix}, not {grouping.prefix}"
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
            return f"{name} must have the shape {shape}, not {tuple(tensor.shape)}"
        if not (tensor.is_floating_point() if real else tensor.dtype == torch.int64):
            return f"{name} must be {'floating point' if real else 'int64'}, not {tensor.dtype}"
    return None


def _broken_count(method: Method, view: View, outcome: Outcome) -> str | None:
    """Require as many groups as `stages` promised, which is what is reported. Behind a mask all tokens may stay."""
    if view.target is None or outcome.policy is not None or outcome.processed is not None:
        return None
    left = outcome.grouping.n_groups - view.prefix
    if method.varies == "no" and left != view.target:
        hint = "A method that cannot leave as many says so in reachable() or stages(), or by `varies`"
        return f"view.target = {view.target} patch tokens must be left, not {left}. {hint}"
    if method.varies == "at_most" and left > view.target:
        return f"at most view.target = {view.target} patch tokens may be left, not {left}"
    return None


def _broken_label(view: View, outcome: Outcome) -> str | None:
    grouping, prefix, n_groups = outcome.grouping, view.prefix, outcome.grouping.n_groups
    if not view.tokens.isfinite().all():
        return None  # NaN in a model means NaN out of it, and labels without meaning
    labels, groups = grouping.labels, torch.arange(n_groups, device=grouping.labels.device)
    patches = labels[:, prefix:]
    if not (labels[:, :prefix] == groups[:prefix]).all():
        return f"the {prefix} prefix tokens must be groups 0 to {prefix - 1}, not {labels[0, :prefix].tolist()}"
    strange = (patches < prefix) | (patches >= n_groups)
    strange = strange & (patches != -1) if grouping.drops else strange
    if strange.any():
        dropped = ", or -1" if grouping.drops else "; -1 drops a token, in a grouping with drops=True"
        hint = "Grouping.of counts prefix tokens by itself"
        label = int(patches[strange][0])
        return f"patch labels must be from {prefix} to {n_groups - 1}{dropped}: one is {label}. {hint}"
    if outcome.weights is not None:
        return None
    filled = torch.zeros(len(labels), n_groups + 1, dtype=torch.bool, device=labels.device)
    filled = filled.scatter(1, labels % (n_groups + 1), True)[:, :-1]  # -1 becomes a column that is cut off
    padding = grouping.sizes == 0
    empty = ~filled if grouping.counts is None else ~filled & ~padding
    if empty.any():
        image, group = (int(index) for index in empty.nonzero()[0])
        return f"every group must have a token: of image {image}, group {group} has none"
    if grouping.chosen is not None and not ((labels.gather(1, grouping.chosen) == groups) | padding).all():
        return "the token that is chosen for a group must be one of its members"
    return None
