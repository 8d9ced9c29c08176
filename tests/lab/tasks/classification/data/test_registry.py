"""Data sets by name, and what a new one needs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agglo.lab.tasks.classification import data as registry
from agglo.lab.tasks.classification.data import DataSet, Listing, dataset_names, detect, open_split

CONTRIBUTING = Path(__file__).parents[5] / "CONTRIBUTING.md"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, DataSet]:
    """What a test registers is forgotten after it."""
    dataset_names()
    copy = dict(registry._KNOWN)
    monkeypatch.setattr(registry, "_KNOWN", copy)
    return copy


def read_nothing(root: Path, split: str) -> Listing:
    raise NotImplementedError


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Five images of two breeds, one of them missing."""
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations").mkdir()
    splits = {"trainval": ["Abyssinian_1", "great_dane_2"], "test": ["great_dane_1", "Abyssinian_3", "great_dane_7"]}
    for file, names in splits.items():
        lines = ["#Image CLASS-ID SPECIES BREED ID", *(f"{name} 1 1 1" for name in names), ""]
        (tmp_path / "annotations" / f"{file}.txt").write_text("\n".join(lines))
        for name in names:
            Image.fromarray(np.full((9, 8, 3), 90, np.uint8)).save(tmp_path / "images" / f"{name}.jpg")
    (tmp_path / "images" / "great_dane_7.jpg").unlink()
    return tmp_path


def test_the_example_of_the_contributing_page(known: dict[str, DataSet], pets: Path) -> None:
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("## How to add a data set")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, "pets.py", "exec"), {"__name__": "pets"})
    assert "pets" in dataset_names() and detect(pets) == "pets"
    with pytest.raises(ValueError, match=r"great_dane_7.*--skip-bad"):
        open_split("pets", pets, "val")
    train = open_split("pets", pets, "train")
    assert train.classes == ["Abyssinian", "great_dane"] and [train[n][1] for n in range(len(train))] == [0, 1]
    with pytest.warns(UserWarning, match="1 skipped"):
        val = open_split("pets", pets, "val", skip_bad=True)
    assert [val[n][1] for n in range(len(val))] == [1, 0] and val[0][0].size == (8, 9)


def test_a_name_is_taken_once(known: dict[str, DataSet]) -> None:
    mine = DataSet("mine", "", read_nothing)
    assert registry.register(mine) is registry.register(mine)
    with pytest.raises(ValueError, match=r"'coco' .*data.sets.coco"):
        registry.register(DataSet("coco", "", read_nothing))
