"""The rules that every outcome of a method must keep.

They are checked the first time that a method reduces so many tokens at a stage: to read the values of labels off the
device takes time. Never while a graph is compiled, traced or captured, which reading would break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agglo.grouping import Grouping

if TYPE_CHECKING:
    from agglo.methods.base import Method, Outcome, View


def require_valid(method: Method, view: View, outcome: Outcome) -> bool:
    """Raise an error that names the method and the rule its outcome breaks; return False if it cannot be read yet."""
    grouping = getattr(outcome, "grouping", None)
    if not isinstance(grouping, Grouping):
        raise TypeError(f"method {method.name!r} must return an Outcome of a Grouping, not {outcome!r}")
    labels = grouping.labels
    on_paper = type(labels) is not Tensor or labels.device.type == "meta"
    if on_paper or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    rule = _broken_rule(method, view, outcome)
    if rule is not None:
        raise ValueError(f"method {method.name!r} breaks a rule at stage {view.stage}: {rule}")
    return True


def _broken_rule(method: Method, view: View, outcome: Outcome) -> str | None:
    batch, n_tokens, width = view.tokens.shape
    grouping, prefix, n_groups = outcome.grouping, view.prefix, outcome.grouping.n_groups
    if grouping.prefix != prefix:
        return f"the grouping's prefix must be view.prefix = {prefix}, not {grouping.prefix}"
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "grouping.labels": (grouping.labels, (batch, n_tokens)),
        "grouping.sizes": (grouping.sizes, (batch, n_groups)),
        "grouping.weights": (grouping.weights, (batch, n_tokens)),
        "grouping.counts": (grouping.counts, (batch,)),
        "grouping.chosen": (grouping.chosen, (batch, n_groups)),
        "tokens": (outcome.tokens, (batch, n_groups, width)),
        "policy": (outcome.policy, (batch, n_groups)),
        "processed": (outcome.processed, (batch, n_groups)),
        "weights": (outcome.weights, (batch, n_groups - prefix, n_tokens - prefix)),
        "loss": (outcome.loss, ()),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            return f"{name} must have the shape {shape}, not {tuple(tensor.shape)}"
        whole = name in ("grouping.labels", "grouping.counts", "grouping.chosen")
        if tensor is not None and not (tensor.dtype == torch.int64 if whole else tensor.is_floating_point()):
            return f"{name} must be {'int64' if whole else 'floating point'}, not {tensor.dtype}"
    # As many groups as `stages` promised, which is what is reported. Behind a mask all tokens may stay.
    left, masked = n_groups - prefix, outcome.policy is not None or outcome.processed is not None
    as_many = view.target is None or left == view.target or (method.varies == "at_most" and left < view.target)
    if not (as_many or masked or method.varies == "about"):
        hint = "A method that cannot leave as many says so in reachable() or stages(), or by `varies`"
        return f"view.target = {view.target} patch tokens are to be left, not {left}. {hint}"
    return _broken_label(view, outcome) if view.tokens.isfinite().all() else None  # NaN in a model means NaN out of it


def _broken_label(view: View, outcome: Outcome) -> str | None:
    grouping, prefix, n_groups = outcome.grouping, view.prefix, outcome.grouping.n_groups
    labels, groups = grouping.labels, torch.arange(n_groups, device=grouping.labels.device)
    patches = labels[:, prefix:]
    if not (labels[:, :prefix] == groups[:prefix]).all():
        return f"the {prefix} prefix tokens must be groups 0 to {prefix - 1}, not {labels[0, :prefix].tolist()}"
    strange = (patches < prefix) | (patches >= n_groups)
    strange = strange & (patches != -1) if grouping.drops else strange
    if strange.any():
        dropped = ", or -1" if grouping.drops else "; -1 drops a token, in a grouping with drops=True"
        return f"patch labels must be from {prefix} to {n_groups - 1}{dropped}: one is {int(patches[strange][0])}"
    if outcome.weights is not None:
        return None
    filled = torch.zeros(len(labels), n_groups + 1, dtype=torch.bool, device=labels.device)
    filled = filled.scatter(1, labels % (n_groups + 1), True)[:, :-1]  # -1 becomes a column that is cut off
    padding = grouping.sizes == 0
    empty = ~filled if grouping.counts is None else ~filled & ~padding
    if empty.any():
        return "every group must have a token: of image {}, group {} has none".format(*empty.nonzero()[0].tolist())
    if grouping.chosen is not None and not ((labels.gather(1, grouping.chosen) == groups) | padding).all():
        return "the token that is chosen for a group must be one of its members"
    return None
