"""A wrong method is refused, by an error that names it and the rule: nothing runs as something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import agglo
from agglo.grouping import Grouping
from agglo.methods import Method, Outcome, View
from agglo.methods.base import Varies
from tests.support.reductions import lively_vit, view

Answer = Callable[[View], Any]


def merged(n_filled: int, n_groups: int) -> Answer:
    """The first tokens stay, and all others join the last one of them."""

    def answer(view: View) -> Outcome:
        batch, n = view.patches.shape[:2]
        labels = torch.arange(n).clamp(max=n_filled - 1).expand(batch, n)
        return Outcome(Grouping.of(labels, n_groups, view.prefix, view.sizes))

    return answer


right = merged(8, 8)


def grouped(**changes: Callable[[Grouping], Any]) -> Answer:
    """The right answer, but for some attributes of its grouping."""

    def answer(view: View) -> Outcome:
        grouping: Grouping = right(view).grouping
        return Outcome(replace(grouping, **{name: change(grouping) for name, change in changes.items()}))

    return answer


def with_label(index: int, value: int) -> Answer:
    return grouped(labels=lambda grouping: grouping.labels.index_fill(1, torch.tensor([index]), value))


class Answers(Method):
    name: ClassVar[str] = "answers"

    def __init__(self, answer: Answer = right) -> None:
        self.answer = answer

    def reduce(self, view: View) -> Outcome:
        outcome: Outcome = self.answer(view)
        return outcome


class AtMost(Answers):
    varies: ClassVar[Varies] = "at_most"


WRONG: dict[str, tuple[Answer, str]] = {
    "joins the class token": (with_label(16, 0), "labels must be from 1 to 8.*drops=True: one is 0"),
    "three too few": (merged(5, 5), "view.target = 8 .* not 5"),
    "one too many": (merged(9, 9), "view.target = 8 .* not 9"),
    "three empty": (merged(5, 8), "of image 0, group 6 has none"),
    "prefix": (grouped(prefix=lambda _: 0), "view.prefix = 1, not 0"),
    "class label": (with_label(0, 1), "the 1 prefix tokens"),
    "beyond": (with_label(16, 17), "from 1 to 8.*one is 17"),
    "short": (grouped(labels=lambda grouping: grouping.labels[:, :-1]), r"the shape \(2, 17\), not \(2, 16\)"),
    "int32": (grouped(labels=lambda grouping: grouping.labels.int()), "labels must be int64, not torch.int32"),
    "no member": (grouped(chosen=lambda grouping: torch.zeros_like(grouping.sizes).long()), "chosen"),
    "tokens": (lambda view: replace(right(view), tokens=view.tokens), r"tokens must have the shape \(2, 9, 8\)"),
    "policy": (lambda view: replace(right(view), policy=torch.ones(2, 3)), r"policy must have the shape \(2, 9\)"),
    "loss": (lambda view: replace(right(view), loss=torch.ones(2)), r"loss must have the shape \(\)"),
    "no outcome": (lambda view: view.tokens, "must return an Outcome"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_refused(name: str) -> None:
    answer, rule = WRONG[name]
    with pytest.raises(TypeError if name == "no outcome" else ValueError, match=f"method 'answers'.*{rule}"):
        Answers(answer).decide(view(n=16, target=8))


def test_counts_may_vary_where_a_method_says_so_and_are_checked_once_per_stage() -> None:
    shown = view(n=16, target=8)
    AtMost(merged(5, 5)).decide(shown)
    with pytest.raises(ValueError, match=r"view.target = 8 .* not 9"):
        AtMost(merged(9, 9)).decide(shown)
    method = Answers()
    method.decide(shown)
    method.answer = merged(5, 8)
    method.decide(shown)  # not looked at again
    with pytest.raises(ValueError, match="every group must have a token"):
        method.decide(replace(shown, stage=1))


@torch.no_grad()
def test_a_model_with_a_right_method_is_one_graph() -> None:
    model, x = agglo.apply(lively_vit(16, 2), Answers(), keep_rate=0.5, blocks=(1,)), torch.randn(2, 3, 16, 16)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
