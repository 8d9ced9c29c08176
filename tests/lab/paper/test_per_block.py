"""Schedules of the comparison with ToMe leave the tokens that both codes leave."""

from __future__ import annotations

import pytest

from agglo.embedded.classifier import NAME
from agglo.lab.paper.classifiers import ATC
from agglo.lab.paper.estimates import BASE, HUGE, LARGE, SMALL, TINY, Size
from agglo.lab.paper.items.per_block import RELEASED, TOME, schedule_of
from agglo.models.opening import ModelSpec, build
from agglo.patch import apply, report
from agglo.schedule import Stages

# Tokens after the last block, class token included: of ToMe's code, of the released ATC, and of an exact one.
AFTER = [
    (BASE, 16, "constant", 11, 17, 5),
    (BASE, 16, "linear", 10, 21, 10),
    (LARGE, 8, "constant", 7, 29, 5),
    (LARGE, 8, "linear", 16, 38, 16),
    (HUGE, 7, "constant", 33, 65, 33),
    (HUGE, 7, "linear", 48, 77, 48),
]


@pytest.mark.parametrize(("size", "t", "kind", "tome", "released", "exact"), AFTER)
def test_tokens_left(size: Size, t: int, kind: str, tome: int, released: int, exact: int) -> None:
    for entry, tokens in ((TOME, tome), (RELEASED[0], released), (ATC[0], exact)):
        schedule = schedule_of(kind, t, size, entry)
        assert schedule is not None
        assert schedule.counts(size.patches, size.depth)[-1] + 1 == tokens, entry.name


def test_the_whole_way_down() -> None:
    tome, released = (schedule_of("linear", 16, BASE, entry) for entry in (TOME, RELEASED[1]))
    assert tome is not None and released is not None
    assert [c + 1 for c in tome.counts(196, 12)] == [165, 136, 110, 87, 67, 50, 36, 25, 17, 12, 10, 10]
    assert [c + 1 for c in released.counts(196, 12)] == [166, 138, 113, 91, 72, 56, 43, 33, 26, 22, 21, 21]


def test_nothing_is_removed_by_the_released_code_at_one_token_per_block() -> None:
    assert schedule_of("constant", 1, BASE, RELEASED[0]) is None
    assert schedule_of("constant", 1, BASE, ATC[0]) is not None
    assert schedule_of("linear", 200, Size(8, 3, patches=5), ATC[0]).counts(5, 3) == [1, 1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "size"), [(NAME, Size(64, 12)), ("deit_tiny_patch16_224", TINY)])
@pytest.mark.parametrize("rate", [1.0, 0.5, 0.25])
def test_estimates_count_what_the_model_counts(name: str, size: Size, rate: float) -> None:
    """All but the patch embedding and the head, which a reduction does not change."""
    model = build(ModelSpec(name))
    apply(model, "atc", keep_rate=rate)
    found = report(model)
    assert found is not None and found.gflops_after is not None
    ends = found.gflops_before - size.multiply_adds() / 1e9
    assert 0 < ends < 0.03 * found.gflops_before
    assert size.multiply_adds(Stages(rate)) / 1e9 + ends == pytest.approx(found.gflops_after)


def test_sizes_are_those_of_the_papers_models() -> None:
    assert [round(size.multiply_adds() / 1e9, 1) for size in (TINY, SMALL, BASE, LARGE)] == [1.2, 4.5, 17.4, 61.4]
