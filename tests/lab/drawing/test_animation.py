"""Animations: frames of one size that show ever fewer groups, in a file that moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agglo.lab.drawing.animation import Cut, counts_between, dissolve, save_animation

Image = pytest.importorskip("PIL.Image")

LABELS = np.arange(16).reshape(4, 4)


@pytest.mark.parametrize(("most", "fewest", "steps"), [(196, 12, 18), (10, 9, 5), (5, 1, 100), (2, 1, 1)])
def test_counts_fall_to_the_fewest(most: int, fewest: int, steps: int) -> None:
    counts = counts_between(most, fewest, steps)
    assert counts == sorted(set(counts), reverse=True)
    assert counts[0] < most and counts[-1] == fewest and len(counts) <= steps


def test_an_animation_begins_with_the_image_and_loses_detail(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    cuts = [Cut(np.minimum(LABELS, k - 1), f"{k}", "a caption of more than one line" * (k == 2)) for k in (8, 4, 2)]
    frames = dissolve(image, cuts, first=Cut(LABELS, "16"), scale=2)
    assert len({frame.size for frame in frames}) == 1
    assert [frame for frame in frames[1:] if np.array_equal(frames[0], frame)] == []
    detail = [np.asarray(frame, dtype=float)[30:140, 20:130].std() for frame in frames]
    assert detail[0] > detail[1] and detail[2] > detail[3]
    path = tmp_path / "a.gif"
    save_animation(frames, path)
    with Image.open(path) as written:
        assert written.n_frames == 4 and written.info["loop"] == 0 and written.size == frames[0].size
        times = []
        for number in range(4):
            written.seek(number)
            written.load()
            times.append(written.info["duration"])
    assert times[0] == times[3] > 5 * times[1] == 5 * times[2]
