"""Which runs a sweep has, and the folder that each of them gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agglo.lab.tasks.classification.training.settings import RECIPES
from agglo.lab.tasks.classification.training.sweep import cell_name, sweep
from agglo.lab.training.recipes import assignments
from agglo.models.opening import ModelSpec, build
from tests.support.fashion import plain, write_fashion


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=5e-4,1e-3", [5e-4, 1e-3]),
        ("linkage=single,average", ["single", "average"]),
        ("keep_rate=0.5,none,0.25", [0.5, "none", 0.25]),
        ("patch_drop_rates=[0.5,0.5],[]", [[0.5, 0.5], []]),
        ("patch_drop_rates=[0.5, 0.5], none, [0.25]", [[0.5, 0.5], "none", [0.25]]),
        ("method_options={a = 1, b = [2, 3]},{}", [{"a": 1, "b": [2, 3]}, {}]),
        ("tracker='a,b',c", ["a,b", "c"]),
        ("checkpoint=w1/m.safetensors,it's [1.pth", ["w1/m.safetensors", "it's [1.pth"]),
        ("cutout=true,false", [True, False]),
        ('schedule="stages:0.9,0.7,0.5,blocks=[3,6,9]",linear:16', ["stages:0.9,0.7,0.5,blocks=[3,6,9]", "linear:16"]),
        ("model=x=1,y", ["x=1", "y"]),
    ],
)
def test_values_are_apart_where_no_bracket_is_open(text: str, values: list[Any]) -> None:
    assert assignments(text) == (text.partition("=")[0], values)


def test_what_is_no_list_of_values_is_told() -> None:
    for text in ("lr", "=1,2"):
        with pytest.raises(ValueError, match="name=value"):
            assignments(text)


def test_plain_cells_have_plain_names() -> None:
    assert cell_name({"lr": 0.001, "linkage": "single"}) == "lr=0.001,linkage=single"
    assert cell_name({"patch_drop_rates": [0.5, 0.25]}) == "patch_drop_rates=[0.5,0.25]"


VALUES = st.one_of(st.text(max_size=300), st.floats(allow_nan=False), st.lists(st.floats(0, 1), max_size=80))


@given(st.lists(VALUES, min_size=2, max_size=5, unique_by=repr))
def test_every_cell_has_a_folder_of_its_own_in_the_sweeps(values: list[Any]) -> None:
    names = [cell_name({"checkpoint": value}) for value in values]
    assert len(set(names)) == len(names)
    for name in names:
        assert Path("sweep", name).resolve().parent == Path("sweep").resolve() and Path(name).name == name
        assert name.isascii() and name.isprintable() and len(name) < 200 and not set(name) & set('\\/:*?"<>|')


def test_a_sweep_over_files_of_one_name(tmp_path: Path) -> None:
    data = write_fashion(tmp_path / "data")
    files = []
    for seed in range(2):
        torch.manual_seed(seed)
        path = tmp_path / f"w{seed}" / "m.pt"
        path.parent.mkdir()
        torch.save(build(ModelSpec("agglo_test_vit")).state_dict(), path)
        files.append(str(path))
    common = {**vars(plain(epochs=1, warmup_epochs=0.0)), "from_scratch": False}
    recipe = RECIPES.parse('[settings]\nmodel = "agglo_test_vit"', "own")
    ranked = sweep(recipe, common, {"checkpoint": files}, data, tmp_path / "out")
    assert {row["checkpoint"] for row in ranked} == set(files)
    for row in json.loads((tmp_path / "out" / "sweep.json").read_text())["ranked"]:
        settings = json.loads((tmp_path / "out" / row["folder"] / "settings.json").read_text())
        assert row["checkpoint"] in str(settings)
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == sorted(
        row["folder"] for row in ranked
    )
