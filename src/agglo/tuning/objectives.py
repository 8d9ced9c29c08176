"""How far a reduced model's output is from the dense model's, image by image, without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

Tensors = Tensor | Sequence[Tensor]
Objective = Callable[[Tensors, Tensors], Tensor]


def kl(dense: Tensor, reduced: Tensor) -> Tensor:
    """Sum over classes of p log(p / q), p and q being the softmax of logits (B, ..., classes); the mean over places in
    between. (B,)"""
    expected = F.log_softmax(dense.float(), dim=-1)
    found = F.log_softmax(reduced.float(), dim=-1)
    return (expected.exp() * (expected - found)).sum(dim=-1).reshape(len(dense), -1).mean(dim=1)


def relative(dense: Tensor, reduced: Tensor) -> Tensor:
    """Length of the difference over the length of the dense output, all numbers of an image as one vector. (B,)"""
    expected, found = (output.float().reshape(len(dense), -1) for output in (dense, reduced))
    return (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-12)


def cosine(dense: Tensor, reduced: Tensor) -> Tensor:
    """1 minus the cosine between the vectors (B, ..., C); the mean over places in between. (B,)"""
    similarity = F.cosine_similarity(dense.float(), reduced.float(), dim=-1)
    return (1 - similarity).reshape(len(dense), -1).mean(dim=1)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "relative": relative, "cosine": cosine}
TITLES = {"kl": "KL to the dense output", "relative": "relative error", "cosine": "1 - cosine"}


def objective_named(objective: str | Objective) -> Objective:
    """A distance by its name, of outputs that are a tensor or several (the mean over them); or a function that was
    given, which gets both outputs as they are."""
    if not isinstance(objective, str):
        return objective
    if objective not in OBJECTIVES:
        accepted = ", ".join(map(repr, OBJECTIVES))
        raise ValueError(f"objective={objective!r} is not known; accepted: {accepted}, or a function of both outputs")
    one = OBJECTIVES[objective]

    def mean(dense: Tensors, reduced: Tensors) -> Tensor:
        if isinstance(dense, Tensor):
            assert isinstance(reduced, Tensor)
            return one(dense, reduced)
        values = [one(expected, found) for expected, found in zip(dense, reduced, strict=True)]
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total / len(values)

    return mean
