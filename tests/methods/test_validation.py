"""A wrong method is refused, by an error that names it and the rule: nothing runs as something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import agglo
from agglo.grouping import Grouping
from agglo.methods import Method, Outcome, View
from agglo.methods.base import Varies
from tests.support.reductions import lively_vit

Answer = Callable[[View], Any]


class Answers(Method):
    """Merges neighbours, unless told to answer otherwise."""

    name: ClassVar[str] = "answers"

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer

    def reduce(self, view: View) -> Outcome:
        outcome: Outcome = (self.answer or right)(view)
        return outcome


class AtMost(Answers):
    varies: ClassVar[Varies] = "at_most"


def merged(view: View, n_filled: int, n_groups: int) -> Outcome:
    """The first tokens stay, and all others join the last one of them."""
    batch, n = view.patches.shape[:2]
    labels = torch.arange(n).clamp(max=n_filled - 1).expand(batch, n)
    return Outcome(Grouping.of(labels, n_groups, view.prefix, view.sizes))


def right(view: View) -> Outcome:
    assert view.target is not None
    return merged(view, view.target, view.target)


def three_too_few(view: View) -> Outcome:
    return merged(view, (view.target or 0) - 3, (view.target or 0) - 3)


def one_too_many(view: View) -> Outcome:
    return merged(view, (view.target or 0) + 1, (view.target or 0) + 1)


def three_empty(view: View) -> Outcome:
    return merged(view, (view.target or 0) - 3, view.target or 0)


def with_label(index: int, value: int) -> Answer:
    """The right answer, with another label of one token."""

    def answer(view: View) -> Outcome:
        grouping = right(view).grouping
        labels = grouping.labels.clone()
        labels[:, index] = value
        return Outcome(replace(grouping, labels=labels))

    return answer


def with_labels(change: Callable[[Tensor], Tensor]) -> Answer:
    return lambda view: Outcome(replace(right(view).grouping, labels=change(right(view).grouping.labels)))


def not_a_member(view: View) -> Outcome:
    kept = torch.arange(view.target or 0).expand(len(view.tokens), -1)
    grouping = Grouping.select(kept, view.patches.shape[1], view.prefix, view.sizes)
    assert grouping.chosen is not None
    return Outcome(replace(grouping, chosen=grouping.chosen.flip(1)))


WRONG: dict[str, tuple[Answer, str]] = {
    "joins the class token": (with_label(-1, 0), "labels must be from 1 to 8.*drops=True: one is 0"),
    "three_too_few": (three_too_few, "view.target = 8 .* not 5"),
    "one_too_many": (one_too_many, "view.target = 8 .* not 9"),
    "three_empty": (three_empty, "of image 0, group 6 has none"),
    "prefix": (lambda view: Outcome(replace(right(view).grouping, prefix=0)), "view.prefix = 1, not 0"),
    "class label": (with_label(0, 1), "the 1 prefix tokens"),
    "beyond": (with_label(-1, 17), "from 1 to 8.*one is 17"),
    "short": (with_labels(lambda labels: labels[:, :-1]), r"labels must have the shape \(2, 17\), not \(2, 16\)"),
    "int32": (with_labels(lambda labels: labels.int()), "labels must be int64, not torch.int32"),
    "not_a_member": (not_a_member, "chosen"),
    "tokens": (lambda view: replace(right(view), tokens=view.tokens), r"tokens must have the shape \(2, 9, 24\)"),
    "policy": (lambda view: replace(right(view), policy=torch.ones(2, 3)), r"policy must have the shape \(2, 9\)"),
    "loss": (lambda view: replace(right(view), loss=torch.ones(2)), r"loss must have the shape \(\)"),
    "no outcome": (lambda view: view.tokens, "must return an Outcome"),
}


def model_with(method: Method, blocks: tuple[int, ...] = (1,)) -> Any:
    return agglo.apply(lively_vit(16, 4), method, keep_rate=0.5, blocks=blocks)


@pytest.mark.parametrize("name", WRONG)
@torch.no_grad()
def test_wrong_answers_are_refused(name: str) -> None:
    answer, rule = WRONG[name]
    with pytest.raises(TypeError if name == "no outcome" else ValueError, match=f"method 'answers'.*{rule}"):
        model_with(Answers(answer))(torch.randn(2, 3, 16, 16))


@torch.no_grad()
def test_right_answers_pass_in_one_graph_and_counts_may_vary_where_a_method_says_so() -> None:
    model, x = model_with(Answers()), torch.randn(2, 3, 16, 16)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    model_with(AtMost(three_too_few))(x)
    with pytest.raises(ValueError, match=r"at most view.target = 8 patch tokens may be left, not 9"):
        model_with(AtMost(one_too_many))(x)


@torch.no_grad()
def test_outcomes_are_checked_once_per_stage() -> None:
    method, x = Answers(), torch.randn(2, 3, 16, 16)
    model = model_with(method, blocks=(1, 2))
    model(x)
    method.answer = three_empty
    model(x)  # an unchecked pass
    with pytest.raises(ValueError, match="every group must have a token"):
        model_with(Answers(three_empty))(x)  # another instance
