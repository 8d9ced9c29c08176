"""Three disjoint parts of the images, and views that depend on nothing but the image, the view and the seed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agglo.healing.images import Parts, PILImages, Tensors, chance_of, source_of
from agglo.models.inputs import Inputs
from agglo.tuning.images import Batch

pytest.importorskip("timm")
pytest.importorskip("torchvision")


@given(st.integers(3, 5000), st.integers(0, 3))
def test_every_image_is_in_one_part(count: int, seed: int) -> None:
    parts = Parts.of(count, seed)
    assert sorted([*parts.training, *parts.stopping, *parts.reporting]) == list(range(count))
    assert len(parts.training) >= count // 3 and min(map(len, parts)) >= 1
    assert Parts.of(count, seed) == parts


@given(
    st.integers(5, 60), st.integers(5, 60), st.sampled_from([1, 3]), st.sampled_from([(16, 16), (8, 24)]),
    st.integers(0, 5), st.booleans(),
)  # fmt: skip
def test_a_view_of_an_image_file(
    width: int, height: int, channels: int, size: tuple[int, int], view: int, labelled: bool
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, height, width, 3), dtype=np.uint8)
    opened = [Image.fromarray(each) for each in pixels]
    images = list(zip(opened, range(3), strict=True)) if labelled else opened
    source = PILImages(images, Inputs(size, (0.5,) * channels, (0.5,) * channels))
    draws = partial(chance_of, 0, view)
    both, one = source.batch([2, 1], draws), source.batch([1], draws)
    assert both.inputs.shape == (2, channels, *size) and both.inputs.dtype == torch.uint8
    assert torch.equal(both.inputs[1], one.inputs[0])
    assert (both.labels.tolist() == [2, 1]) if labelled else both.labels is None
    assert not torch.equal(source.batch([1], partial(chance_of, 0, view + 1)).inputs, one.inputs)
    assert source.normalise(one.inputs).abs().max() <= 1


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_a_view_of_a_tensor_is_shifted_by_little_and_perhaps_mirrored(height: int, width: int, view: int) -> None:
    image = torch.arange(float(height * width)).reshape(1, 1, height, width)
    [seen] = Tensors(Batch(image, None, 1)).batch([0], partial(chance_of, 0, view)).inputs
    most = (height // 14, width // 14)
    padded = torch.nn.functional.pad(image, (most[1], most[1], most[0], most[0]), mode="replicate")[0]
    windows = [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * most[0] + 1)
        for left in range(2 * most[1] + 1)
    ]
    mirrored = torch.nn.functional.pad(image.flip(-1), (most[1], most[1], most[0], most[0]), mode="replicate")[0]
    windows += [
        mirrored[:, top : top + height, left : left + width]
        for top in range(2 * most[0] + 1)
        for left in range(2 * most[1] + 1)
    ]
    assert any(torch.equal(seen, window) for window in windows)


def test_files_are_opened_when_they_are_asked_for(tmp_path: Path) -> None:
    import timm

    model = timm.create_model("test_vit")
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    source = source_of(paths[:1] + paths, model, None, tuples_are_inputs=False)
    for number, path in enumerate(paths):
        Image.new("RGB", (200, 180), (number, 0, 0)).save(path)
    assert len(source) == 5 and source.batch([0, 3]).inputs[:, 0, 0, 0].tolist() == [0, 2]
