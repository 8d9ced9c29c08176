"""Curves of agglo tune: every point of the file, in the right place, and as a reduction."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agglo import tuned
from agglo.experiments.models import ModelSpec
from agglo.playground.belonging import how_to_open, tab_of
from agglo.playground.fronts import GFLOPS, SPEED, Front, Fronts, read
from agglo.playground.models import Models, Wanted
from agglo.playground.page.html import groups_figure
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


def of(model: str, objective: str = "kl") -> Front:
    """A result for a model of that name."""
    return replace(read(HALF), model=model, objective=objective)


def tab(model: str, **wanted: Any) -> str | None:
    return tab_of(of(model), Models(Wanted(**wanted)).names)


def test_results_know_the_tab_of_their_model() -> None:
    assert tab("agglo_fashion_vit") == "tokens"
    assert tab("agglo_fashion_dit") == "synthesis"
    assert tab("agglo_fashion_detector") == "detection"
    deit = ModelSpec("deit_tiny_patch16_224")
    assert tab("deit_tiny_patch16_224") is None and tab("deit_tiny_patch16_224", classifier=deit) == "tokens"
    assert tab("hf:/home/anna/vit/", classifier=ModelSpec("hf:/home/anna/vit")) == "tokens"
    assert tab("hf:/home/bert/vit", classifier=ModelSpec("hf:/home/anna/vit")) is None  # not by the last part alone


def test_a_model_whose_place_another_took_has_no_tab() -> None:
    for model, wanted, option in [
        ("agglo_fashion_vit", {"classifier": ModelSpec("deit_tiny_patch16_224")}, "--model"),
        ("agglo_fashion_dit", {"pipeline": "/home/anna/sd"}, "--pipeline"),
        ("agglo_fashion_detector", {"detector": "runs/mine"}, "--detector"),
    ]:
        assert tab(model, **wanted) is None
        told = how_to_open(of(model))
        assert "Not applied" in told and f"agglo play without {option} runs it" in told
    assert tab("/home/anna/sd/", pipeline="/home/anna/sd") == "synthesis"
    assert tab("runs/mine", detector="runs/mine") == tab("Detector", detector="runs/mine") == "detection"


def test_who_chose_a_point_of_another_model_reads_how_to_open_it() -> None:
    assert "agglo play --model deit_tiny_patch16_224 --checkpoint F" in how_to_open(of("deit_tiny_patch16_224"))
    assert "--pipeline" in how_to_open(of("UNet2DConditionModel", "relative"))
    assert "--model" not in how_to_open(of("UNet2DConditionModel", "relative"))
    own = how_to_open(of("hf:/home/anna/vit"))
    assert "for vit, which" in own and "agglo play --model" in own and "anna" not in own


@pytest.mark.parametrize(
    "model", ["hf:/home/anna/vit", "open_clip:local-dir:../anna/vit/", "local-dir:anna/vit", r"hf:C:\anna\vit"]
)
def test_the_folder_of_a_model_is_not_shown(model: str) -> None:
    shown = front_html(of(model), SPEED, 0) + how_to_open(of(model))
    assert "anna" not in shown and "vit, measured on" in shown


def test_words_of_a_file_are_no_markup() -> None:
    evil = "<img src=x onerror=alert(1)>"
    front = read(HALF)
    point = replace(front.points[1], method=evil)
    front = replace(front, name=evil, model=evil, where=evil, objective=evil, accuracy=None, points=(point,))
    labels = np.zeros((2, 2), np.int64)
    shown = front_html(front, SPEED, 0) + point_html(front, 0, how_to_open(front))
    shown += groups_figure(np.zeros((4, 4, 3), np.uint8), labels, "after block 3", front.chosen(0).title)
    assert "<img src=x" not in shown and "&lt;img src=x onerror=alert(1)&gt;" in shown
