"""Results are read by path and by name; what is no result is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import agglo
from agglo import tuned as ready_made
from agglo.tuned import FORMAT
from agglo.tuning.result import promise
from tests.support.fashion import agglo_test_vit

FOUND = agglo.ReductionConfig.parse("tome:schedule=(counts:30,20,blocks=[1,2]),features=tokens")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return agglo_test_vit().eval()


def write(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps({"format": FORMAT, "config": FOUND.to_dict(), **content}))
    return path


def test_a_result_is_applied_from_a_file_a_name_and_its_config(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agglo.apply(model, FOUND)
    expected = agglo.report(model)
    assert expected is not None and expected.counts == [49, 30, 20, 20]
    path = write(tmp_path / "test_vit-2x.json")
    monkeypatch.setattr(ready_made, "_FOLDER", tmp_path)
    for source in (path, str(path), "test_vit-2x"):
        agglo.remove(model)
        agglo.apply(model, tuned=source)
        assert agglo.report(model) == expected
        assert agglo.tuning.Tuned.load(source).config == FOUND
    for refused, named in (
        ({"tuned": "test_vit-3x"}, "test_vit-3x"),
        ({"tuned": path, "keep_rate": 0.5}, "keep_rate"),
    ):
        with pytest.raises(ValueError, match=named):
            agglo.apply(model, **refused)


def test_files_that_are_no_result_are_told(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\x00")
    (tmp_path / "list.json").write_text("[1]")
    for name in ("bytes.json", "list.json"):
        with pytest.raises(ValueError, match=name):
            agglo.apply(model, tuned=tmp_path / name)
    with pytest.raises(ValueError, match="agglo tuned 9"):
        agglo.apply(model, tuned=write(tmp_path / "later.json", format="agglo tuned 9"))
    with pytest.raises(ValueError, match="stopped"):
        agglo.tuning.Tuned.load(write(tmp_path / "stopped.json", config=None))
    with pytest.raises(ValueError, match="stopped"):
        agglo.apply(model, tuned=tmp_path / "stopped.json")


def test_every_ready_made_result_is_whole() -> None:
    for name in ready_made.names():
        tuned = agglo.tuning.Tuned.load(name)
        assert 0 < tuned.gflops < 1 < tuned.speedup and not promise(tuned.content).startswith("missed")
        assert str(tuned.config.schedule or tuned.config.keep_rate) in tuned.report()
        assert name.startswith(tuned.content["model"]["name"])


def test_a_result_that_is_slower_than_the_dense_model_says_so() -> None:
    content = ready_made.read("deit_tiny_patch16_224-half")
    slow = {**content, "chosen": {**content["chosen"], "speed": {**content["chosen"]["speed"], "median": 0.7}}}
    assert "0.70 times the dense model's speed" in agglo.tuning.Tuned(slow).report()
    assert "dense model's speed" not in agglo.tuning.Tuned(content).report()


def of_drop(lost: int, gained: int | None, images: int, most: float) -> str:
    quality = {"images": images, "total": 1.0, "squares": 1.0, "differing": lost, "lost": None, "gained": None}
    if gained is not None:
        quality.update(lost=lost, gained=gained)
    content = {"target": {"kind": "max_drop", "value": most}, "chosen": {"confirmation": quality}}
    return promise(content)


def test_a_promise_is_made_only_where_images_can_show_it() -> None:
    assert of_drop(5, 3, 5000, 1.0).startswith("kept: ")
    assert of_drop(100, 10, 1000, 1.0).startswith("missed: ")
    # 0.4 points lost of 500 images, 0.57 of error: as well none as more than one.
    assert of_drop(5, 3, 500, 1.0).startswith("not shown: ")
    assert "decisions" in of_drop(0, None, 500, 1.0)
