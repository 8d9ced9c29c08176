"""Pieces of the page: pictures inside the text, and text that cannot become markup."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
from PIL import Image

from agglo.playground.page.html import code, data_url, groups_figure, refused, scale_for
from agglo.playground.page.picker import script


def opened(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_small_pictures_are_exact_and_large_ones_small() -> None:
    draws = np.random.default_rng(0)
    small = draws.integers(0, 256, (28, 28, 3), dtype=np.uint8)
    assert np.array_equal(opened(data_url(small)), small)
    photo = Image.fromarray(draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (448, 448), Image.Resampling.BICUBIC
    )
    noisy = np.clip(np.asarray(photo) + draws.normal(0, 12, (448, 448, 3)), 0, 255).astype(np.uint8)
    url = data_url(noisy)
    assert url.startswith("data:image/webp") and opened(url).size == (448, 448)
    assert np.abs(np.asarray(opened(url).convert("RGB"), float) - noisy).mean() < 10


def test_figures_hold_their_groups() -> None:
    labels = np.array([[0, 0, 2], [3, -1, 2]])
    figure = groups_figure(np.zeros((20, 30, 3), np.uint8), labels, "after block 3", "atc")
    assert 'data-rows="2" data-columns="3" data-labels="0,0,2,3,-1,2" data-count="3"' in figure
    assert 'data-down="2" data-across="3"' in figure and 'viewBox="0 0 3 2"' in figure
    beyond = groups_figure(np.zeros((15, 25, 3), np.uint8), labels, "after block 3", "atc", spans=(1.5, 2.5))
    assert 'data-down="1.5" data-across="2.5"' in beyond and 'viewBox="0 0 2.5 1.5"' in beyond
    assert 'data-name="atc after block 3"' in figure and scale_for(np.zeros((500, 900, 3), np.uint8)) == 1


def test_scripts_make_no_markup_of_words() -> None:
    """What is escaped in an attribute is not when a script reads it."""
    for name in ("groups.js", "picker.js", "points.js"):
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", script(name))


def test_words_cannot_become_markup() -> None:
    for made in (refused("<script>alert(1)</script>"), code(['<img src=x onerror="alert(1)">'])):
        assert "<script" not in made and "<img" not in made
