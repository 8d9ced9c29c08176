"""Scenes: the same every time, with masks that are exactly what was painted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agglo.embedded import classifier
from agglo.lab.tasks.detection.data.scenes import Scenes, make_scenes
from agglo.lab.tasks.detection.evaluation.average_precision import average_precision

FASHION = Path(classifier.__file__).parent / "fashion-mnist"


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return make_scenes(FASHION, 24, seed=1, split="val")


def test_a_scene_depends_on_its_number_alone(scenes: Scenes) -> None:
    fewer, other = (make_scenes(FASHION, 3, seed=seed, split="val") for seed in (1, 2))
    for index in (2, 0, 1):
        ours, theirs = scenes.scene(index), fewer.scene(index)
        assert np.array_equal(ours.pixels, theirs.pixels) and np.array_equal(ours.masks, theirs.masks)
        assert ours.labels == theirs.labels
    assert not np.array_equal(scenes.scene(0).pixels, other.scene(0).pixels)
    assert len({each.fingerprint() for each in (scenes, fewer, other)}) == 3


def test_targets_and_ground_truth_say_the_same(scenes: Scenes) -> None:
    truth = scenes.ground_truth
    assert [entry["id"] for entry in truth["annotations"]] == list(range(1, len(truth["annotations"]) + 1))
    for index in range(len(scenes)):
        image, target = scenes[index]
        assert image.mode == "RGB" and image.size == (112, 112) and target["original_size"] == (112, 112)
        entries = [entry for entry in truth["annotations"] if entry["image_id"] == target["image_id"]]
        assert [scenes.category_ids[label] for label in target["labels"]] == [e["category_id"] for e in entries]
        for box, mask, entry in zip(target["boxes"].tolist(), target["masks"], entries, strict=True):
            rows, columns = mask.nonzero().T
            assert box == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            x, y, w, h = entry["bbox"]
            assert [x, y, x + w, y + h] == box and entry["area"] == mask.sum()
        assert int(target["masks"].sum(0).max()) <= 1  # a pixel belongs to one garment
    found = [{**entry, "score": 1.0} for entry in truth["annotations"]]
    for numbers in average_precision(truth, found).values():
        assert numbers["AP"] == pytest.approx(1)


def test_other_sizes_and_splits() -> None:
    for size in (32, 65):
        scene = make_scenes(FASHION, 1, split="val", size=size).scene(0)
        assert scene.pixels.shape == (size, size) and scene.masks.shape[1:] == (size, size)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte is missing"):
        make_scenes(FASHION, 1, split="train")
    for wrong in ({"split": "test"}, {"count": 0}, {"size": 20}):
        with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
            make_scenes(FASHION, **{"count": 1, "split": "val", **wrong})  # type: ignore[arg-type]
