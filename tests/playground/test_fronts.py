"""Curves of agglo tune: every point of the file, in the right place, and as a reduction."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agglo import tuned
from agglo.playground.fronts import GFLOPS, SPEED, Fronts, read, task_of
from agglo.playground.page.tune_html import front_html, point_html
from agglo.tuning.statistics import quality_from

HALF = "agglo_fashion_vit-half"


def test_every_ready_made_result_is_there_with_its_answer_first() -> None:
    fronts = Fronts()
    assert list(fronts.by_name) == tuned.names()
    for name, front in fronts.by_name.items():
        content = tuned.read(name)
        assert front.points[0].arguments == content["apply"] and front.points[0].is_answer
        assert [point.is_answer for point in front.points[1:]] == [False] * (len(front.points) - 1)
        asked = [json.dumps(point["apply"]) for point in (content["chosen"], *content["beside"], *content["front"])]
        assert [json.dumps(point.arguments) for point in front.points] == list(dict.fromkeys(asked))


def test_heights_are_accuracies_where_there_are_labels_and_distances_where_not() -> None:
    front = read(HALF)
    content = tuned.read(HALF)
    quality = quality_from(content["chosen"]["search"])
    assert quality.lost is not None and quality.gained is not None
    accuracy = content["dense"]["accuracy"] - 100 * (quality.lost - quality.gained) / quality.images
    assert front.height(front.points[0])[0] == pytest.approx(accuracy)
    dit = read("agglo_fashion_dit-0.8")
    assert dit.height(dit.points[0])[0] == quality_from(tuned.read(dit.name)["chosen"]["search"]).distance


def test_dots_are_as_far_as_the_axis_says() -> None:
    front = read(HALF)
    for axis, value in ((SPEED, lambda point: point.speed), (GFLOPS, lambda point: 1 / point.gflops)):
        assert [dot.x for dot in front.dots(axis)] == [value(point) for point in front.points]
        page = front_html(front, axis, 2)
        assert re.findall(r'data-point="(\d+)"', page) == [str(number) for number in range(len(front.points))]
        assert len(re.findall(r'class="point lit" data-point="2"', page)) == 1


def test_a_point_is_a_reduction_by_its_reference() -> None:
    fronts = Fronts()
    front = fronts.named(HALF)
    for number, point in enumerate(front.points):
        chosen = fronts.resolve(front.reference(number))
        assert chosen is not None and chosen.arguments == point.arguments
    assert fronts.resolve("atc") is None
    for wrong in (f"{HALF}#99", "nobody#0"):
        with pytest.raises(ValueError, match=r"no point 99|no result 'nobody'"):
            fronts.resolve(wrong)


def test_points_in_words() -> None:
    front = read(HALF)
    html = point_html(front, 0, "Applied.")
    assert "agglo.apply(model, tuned=&quot;agglo_fashion_vit-half&quot;)" in html
    assert f"{front.points[0].gflops:.3f} of the dense" in html
    assert "agglo.apply(model, &quot;atc&quot;" in point_html(front, 1, "")


def test_a_file_of_ones_own_is_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tuned.read(HALF)))
    fronts = Fronts([path])
    assert fronts.named("mine").points == fronts.named(HALF).points
    assert fronts.named("mine").chosen(0).line.startswith('agglo.apply(model, "tome"')  # not by a name nobody else has
    content = tuned.read(HALF)
    path.write_text(json.dumps({**content, "apply": None}))
    with pytest.raises(ValueError, match="was stopped"):
        Fronts([path])


def test_results_know_their_tab() -> None:
    assert task_of("agglo_fashion_vit", "agglo_fashion_vit") == "tokens"
    assert task_of("agglo_fashion_dit", "x") == "synthesis"
    assert task_of("agglo_fashion_detector", "x") == "detection"
    assert task_of("deit_tiny_patch16_224", "agglo_fashion_vit") is None
    assert task_of("deit_tiny_patch16_224", "deit_tiny_patch16_224") == "tokens"
