"""Schedules of the comparison with ToMe leave the tokens that both codes leave."""

from __future__ import annotations

import pytest

from agglo.lab.paper.classifiers import ATC, Backbone
from agglo.lab.paper.items.per_block import RELEASED, TOME, schedule_of

BASE, LARGE, HUGE = ((196, 12), (196, 24), (256, 32))
# Tokens after the last block, class token included: of ToMe's code, of the released ATC, and of an exact one.
AFTER = [
    (BASE, 16, "constant", 11, 17, 5),
    (BASE, 16, "linear", 10, 21, 10),
    (LARGE, 8, "constant", 7, 29, 5),
    (LARGE, 8, "linear", 16, 38, 16),
    (HUGE, 7, "constant", 33, 65, 33),
    (HUGE, 7, "linear", 48, 77, 48),
]


def subject(patches: int, depth: int) -> Backbone:
    return Backbone("vit", "imagenet", 1, patches=patches, depth=depth)


@pytest.mark.parametrize(("size", "t", "kind", "tome", "released", "exact"), AFTER)
def test_tokens_left(size: tuple[int, int], t: int, kind: str, tome: int, released: int, exact: int) -> None:
    for entry, tokens in ((TOME, tome), (RELEASED[0], released), (ATC[0], exact)):
        schedule = schedule_of(kind, t, subject(*size), entry)
        assert schedule is not None
        assert schedule.counts(*size)[-1] + 1 == tokens, entry.name


def test_nothing_is_removed_by_the_released_code_at_one_token_per_block() -> None:
    assert schedule_of("constant", 1, subject(*BASE), RELEASED[0]) is None
    assert schedule_of("constant", 1, subject(*BASE), ATC[0]) is not None
    assert schedule_of("linear", 200, subject(5, 3), ATC[0]).counts(5, 3) == [1, 1, 1]  # type: ignore[union-attr]
