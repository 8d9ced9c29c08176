"""A wrong method is refused, by an error that names it and the rule: nothing runs as something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import agglo
from agglo.grouping import Grouping
from agglo.methods import Method, Outcome, View, create
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


def labels_of(view: View, n_groups: int | None = None) -> Tensor:
    batch, n = view.patches.shape[:2]
    return torch.arange(n).clamp(max=(n_groups or view.target or 1) - 1).expand(batch, n)


def right(view: View) -> Outcome:
    assert view.target is not None
    return Outcome(Grouping.of(labels_of(view), view.target, view.prefix, view.sizes))


def with_labels(change: Callable[[Tensor, View], Tensor]) -> Answer:
    """The right answer, with other labels."""

    def answer(view: View) -> Outcome:
        grouping = right(view).grouping
        return Outcome(Grouping(change(grouping.labels.clone(), view), grouping.sizes, view.prefix, view.sizes))

    return answer


def minus_one(view: View) -> Outcome:
    """Drops the last token without saying so: it would join the class token."""
    labels = labels_of(view).clone()
    labels[:, -1] = -1
    return Outcome(Grouping.of(labels, view.target or 0, view.prefix, view.sizes))


def three_too_few(view: View) -> Outcome:
    n_groups = (view.target or 0) - 3
    return Outcome(Grouping.of(labels_of(view, n_groups), n_groups, view.prefix, view.sizes))


def three_empty(view: View) -> Outcome:
    return Outcome(Grouping.of(labels_of(view, (view.target or 0) - 3), view.target or 0, view.prefix, view.sizes))


def one_too_many(view: View) -> Outcome:
    n_groups = (view.target or 0) + 1
    return Outcome(Grouping.of(labels_of(view, n_groups), n_groups, view.prefix, view.sizes))


def forgotten_prefix(view: View) -> Outcome:
    n = view.tokens.shape[1]
    labels = torch.arange(n).clamp(max=view.target or 0).expand(len(view.tokens), n)
    return Outcome(Grouping.of(labels, (view.target or 0) + 1))


def not_a_member(view: View) -> Outcome:
    grouping = Grouping.select(labels_of(view)[:, : view.target], view.patches.shape[1], view.prefix, view.sizes)
    assert grouping.chosen is not None
    return Outcome(Grouping(grouping.labels, grouping.sizes, view.prefix, None, None, True, grouping.chosen.flip(1)))


def set_class_label(labels: Tensor, view: View) -> Tensor:
    labels[:, 0] = 1
    return labels


def set_last_label(labels: Tensor, view: View) -> Tensor:
    labels[:, -1] = view.tokens.shape[1]
    return labels


WRONG: dict[str, tuple[Answer, str]] = {
    "minus_one": (minus_one, "labels must be from 1 to 8.*drops=True: one is 0"),
    "three_too_few": (three_too_few, "view.target = 8 .* not 5"),
    "one_too_many": (one_too_many, "view.target = 8 .* not 9"),
    "three_empty": (three_empty, "every group must have a token: of image 0, group 6 has none"),
    "forgotten_prefix": (forgotten_prefix, "prefix must be view.prefix = 1, not 0"),
    "class label": (with_labels(set_class_label), "the 1 prefix tokens"),
    "beyond": (with_labels(set_last_label), "from 1 to 8.*one is 17"),
    "short": (with_labels(lambda labels, view: labels[:, :-1]), r"labels must have the shape \(2, 17\), not \(2, 16\)"),
    "int32": (with_labels(lambda labels, view: labels.int()), "labels must be int64, not torch.int32"),
    "not_a_member": (not_a_member, "chosen for a group must be one of its members"),
    "tokens": (
        lambda view: Outcome(right(view).grouping, view.tokens),
        r"tokens must have the shape \(2, 9, 24\), not \(2, 17, 24\)",
    ),
    "policy": (
        lambda view: Outcome(right(view).grouping, policy=torch.ones(2, 3)),
        r"policy must have the shape \(2, 9\), not \(2, 3\)",
    ),
    "loss": (lambda view: Outcome(right(view).grouping, loss=torch.ones(2)), r"loss must have the shape \(\)"),
    "no outcome": (lambda view: labels_of(view), "must return an Outcome"),
}


def model_with(method: Method, depth: int = 4, **request: Any) -> Any:
    return agglo.apply(lively_vit(16, depth), method, **(request or {"keep_rate": 0.5, "blocks": (1,)}))


@pytest.mark.parametrize("name", WRONG)
@torch.no_grad()
def test_wrong_answers_are_refused(name: str) -> None:
    answer, rule = WRONG[name]
    error = TypeError if name == "no outcome" else ValueError
    with pytest.raises(error, match=f"method 'answers'.*{rule}"):
        model_with(Answers(answer))(torch.randn(2, 3, 16, 16))


@torch.no_grad()
def test_right_answers_pass_and_counts_may_vary_where_a_method_says_so() -> None:
    x = torch.randn(2, 3, 16, 16)
    model_with(Answers())(x)
    model_with(AtMost(three_too_few))(x)
    with pytest.raises(ValueError, match=r"at most view.target = 8 patch tokens may be left, not 9"):
        model_with(AtMost(one_too_many))(x)


@torch.no_grad()
def test_labels_are_read_once_per_situation_and_always_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGGLO_DEBUG", raising=False)
    method, x = Answers(), torch.randn(2, 3, 16, 16)
    model = model_with(method, keep_rate=0.5, blocks=(1, 2))
    model(x)
    method.answer = three_empty
    model(x)  # an unchecked pass
    monkeypatch.setenv("AGGLO_DEBUG", "1")
    with pytest.raises(ValueError, match="stage 0: every group must have a token"):
        model(x)
    monkeypatch.setenv("AGGLO_DEBUG", "0")
    model(x)
    method.answer = three_too_few  # shapes are looked at on every pass
    with pytest.raises(ValueError, match="must be left, not 5"):
        model(x)
    with pytest.raises(ValueError, match="every group must have a token"):
        model_with(Answers(three_empty))(x)  # another instance


@torch.no_grad()
def test_a_later_stage_is_checked_too() -> None:
    def wrong_later(view: View) -> Outcome:
        return minus_one(view) if view.stage else right(view)

    with pytest.raises(ValueError, match="breaks a rule at stage 1"):
        model_with(Answers(wrong_later), keep_rate=0.5, blocks=(1, 2))(torch.randn(2, 3, 16, 16))


@torch.no_grad()
def test_values_that_are_no_numbers_pass_through() -> None:
    logits = model_with(create("atc"))(torch.full((2, 3, 16, 16), torch.nan))
    assert logits.isnan().all()


@torch.no_grad()
def test_checking_leaves_one_graph() -> None:
    model, x = model_with(Answers()), torch.randn(2, 3, 16, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
