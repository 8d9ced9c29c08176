"""Printed numbers are the paper's, and what follows from them is what the paper says follows."""

from __future__ import annotations

from typing import Any

import pytest

from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import PAPER
from agglo.lab.paper.items.ranking import (
    HARD_MERGING,
    by_seed,
    differences,
    mean_ranks,
    measured_accuracies,
    printed_accuracies,
)

PRINTED = printed_accuracies()


def test_entries() -> None:
    assert printed.value("fine-tuned", "deit_base_patch16_224", "nabirds", "dense") == 83.32
    assert printed.value("detection", "small", "fine-tuned", "atc complete", 0.9, "mask") == 42.7
    assert printed.value("hyper-parameters", "atc complete", 0.9) == [20, 1, 0]
    assert printed.value("fine-tuned", "no such model", "imagenet") is None


def test_tables_are_whole() -> None:
    assert len(PRINTED) == 3 * 4 * 4 and set(printed.content()["methods"]) == {entry.name for entry in PAPER}
    for place, row in PRINTED.items():
        absent = {entry.name for entry in PAPER} - row.keys()
        assert absent == ({"tome"} if 0.25 in place else set()), place
    with pytest.raises(ValueError, match="'nothing'"):
        printed.table("nothing")


def test_mean_ranks_of_hard_merging() -> None:
    """ATC average 1.97 +- 1.17, and so on."""
    found = mean_ranks(printed_accuracies(HARD_MERGING))
    assert list(found) == ["atc average", "atc complete", "atc single", "tome", "dpc_knn", "kmedoids"]
    for name, said in printed.statement("rank").items():
        assert found[name] == pytest.approx(said, abs=0.006), name


@pytest.mark.parametrize(("statement", "soft"), [("difference", False), ("difference with soft merging", True)])
def test_differences_to_the_best_prior_method(statement: str, soft: bool) -> None:
    found = differences(PRINTED, soft=soft)
    for name, by_rate in printed.statement(statement).items():
        for rate, said in by_rate.items():
            assert found[name][float(rate)] == pytest.approx(said, abs=0.006), (name, rate)


def test_ranking_per_rate_among_all_methods() -> None:
    for rate, said in printed.statement("ranking-per-rate").items():
        found = mean_ranks(PRINTED, float(rate))
        assert list(found)[: len(said)] == list(said), "the same order"
        for name, rank in said.items():
            assert found[name][0] == pytest.approx(rank, abs=0.006), (name, rate)
    assert list(mean_ranks(PRINTED, 0.9)).index("atc average") == 5, "sixth at 90 %"


def results(values: dict[str, dict[float, list[float]]]) -> list[dict[str, Any]]:
    where = {"model": "m", "data": "d"}
    return [
        {**where, "method": name, "keep_rate": rate, "seed": seed, "top1": top1, "images": 100}
        for name, by_rate in values.items()
        for rate, seeds in by_rate.items()
        for seed, top1 in enumerate(seeds)
    ]


def test_ranks_share_and_leave_out() -> None:
    grid = {("m", "d", 0.25): {"a": 5.0, "b": 5.0, "c": 6.0}, ("m", "d", 0.5): {"a": 1.0, "b": 2.0}}
    assert mean_ranks(grid) == {"c": (1.0, 0.0), "b": (1.75, 0.75), "a": (2.25, 0.25)}
    assert mean_ranks(grid, 0.5) == {"b": (1.0, 0.0), "a": (2.0, 0.0)}


def test_only_seeds_that_all_have_are_compared() -> None:
    """A mean of three seeds is not compared with one seed of another method."""
    measured = results({"atc average": {0.5: [70.0, 80.0, 90.0]}, "tome": {0.5: [71.0]}, "sit": {0.5: [1.0, 99.0]}})
    place = ("m", "d", 0.5)
    assert measured_accuracies(measured, ["atc average", "tome"]) == {place: {"atc average": 70.0, "tome": 71.0}}
    assert measured_accuracies(measured, ["atc average", "sit"])[place] == {"atc average": 75.0, "sit": 50.0}
    assert set(by_seed(measured, ["atc average", "sit"])) == {0, 1}
    measured.append({"model": "m", "data": "d", "method": "tome", "keep_rate": 0.25, "seed": 0, "cannot": "no"})
    assert measured_accuracies(measured, ["tome"]) == {place: {"tome": 71.0}}
