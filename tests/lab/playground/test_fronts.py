"""Curves of agglo tune: every point of the file, in the right place, and as a reduction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agglo import tuned
from agglo.lab.playground.fronts import GFLOPS, SPEED, Fronts, read
from agglo.lab.playground.models import Models, Wanted
from agglo.lab.playground.page.html import curve_html
from agglo.models.opening import ModelSpec
from agglo.tuning.statistics import Quality

HALF = "agglo_fashion_vit-half"


def test_every_ready_made_result_is_there_with_its_answer_first() -> None:
    fronts = Fronts()
    assert list(fronts.by_name) == tuned.names()
    for name, front in fronts.by_name.items():
        content = tuned.read(name)
        assert front.points[0].config.to_dict() == content["config"]
        assert [point.is_answer for point in front.points] == [True] + [False] * (len(front.points) - 1)
        asked = [json.dumps(point["config"]) for point in (content["chosen"], *content["beside"], *content["front"])]
        assert [json.dumps(point.config.to_dict()) for point in front.points] == list(dict.fromkeys(asked))


def test_points_are_placed_by_speed_or_gflops_and_by_accuracy_or_distance() -> None:
    front, content = read(HALF), tuned.read(HALF)
    point, quality = front.points[0], Quality(**content["chosen"]["search"])
    assert (point.x(SPEED), point.x(GFLOPS)) == (content["chosen"]["speed"]["median"], 1 / content["chosen"]["gflops"])
    assert quality.lost is not None and quality.gained is not None
    accuracy = content["dense"]["accuracy"] - 100 * (quality.lost - quality.gained) / quality.images
    assert front.y(point)[0] == pytest.approx(accuracy)
    without_labels = read("agglo_fashion_dit-0.8")
    distance = Quality(**tuned.read(without_labels.name)["chosen"]["search"]).distance
    assert without_labels.y(without_labels.points[0])[0] == distance


def test_a_point_is_a_reduction_by_its_reference() -> None:
    fronts = Fronts()
    front = fronts.named(HALF)
    for number, point in enumerate(front.points):
        chosen = fronts.resolve(front.reference(number))
        assert chosen is not None and chosen.config == point.config
    assert fronts.resolve("atc") is None
    for wrong in (f"{HALF}#99", "nobody#0"):
        with pytest.raises(ValueError, match=r"99|nobody"):
            fronts.resolve(wrong)


def test_a_file_of_ones_own_is_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tuned.read(HALF)))
    fronts = Fronts([path])
    assert fronts.named("mine").points == fronts.named(HALF).points
    assert "tuned=" not in fronts.named("mine").chosen(0).line  # not by a name that nobody else has
    path.write_text(json.dumps({**tuned.read(HALF), "config": None}))
    with pytest.raises(ValueError, match="stopped"):
        Fronts([path])


def tab(model: str, **wanted: Any) -> str | None:
    return Models(Wanted(**wanted)).tab_for_model(model)


def test_results_find_the_tab_of_their_model() -> None:
    assert tab("agglo_fashion_vit") == "tokens"
    assert tab("agglo_fashion_dit") == "synthesis"
    assert tab("agglo_fashion_detector") == "detection"
    deit = ModelSpec("deit_tiny_patch16_224")
    assert tab("deit_tiny_patch16_224") is None and tab("deit_tiny_patch16_224", classifier=deit) == "tokens"
    assert tab("hf:/home/anna/vit/", classifier=ModelSpec("hf:/home/anna/vit")) == "tokens"
    assert tab("hf:/home/bert/vit", classifier=ModelSpec("hf:/home/anna/vit")) is None  # not by the last part alone
    assert tab("/home/anna/sd/", pipeline="/home/anna/sd") == "synthesis"
    assert tab("runs/mine", detector="runs/mine") == tab("Detector", detector="runs/mine") == "detection"


def test_a_model_whose_place_another_took_has_no_tab() -> None:
    assert tab("agglo_fashion_vit", classifier=ModelSpec("deit_tiny_patch16_224")) is None
    assert tab("agglo_fashion_dit", pipeline="/home/anna/sd") is None
    assert tab("agglo_fashion_detector", detector="runs/mine") is None


@pytest.mark.parametrize("model", ["hf:/home/anna/vit", "open_clip:local-dir:../anna/vit/", r"hf:C:\anna\vit"])
def test_the_folder_of_a_model_is_not_shown(model: str) -> None:
    front = replace(read(HALF), model=model)
    assert front.title == "vit" and "anna" not in curve_html(front, SPEED, 0)
