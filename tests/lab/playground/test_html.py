"""Results as HTML: images inside the text, text that cannot become markup, no paths of the server."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.cluster.hierarchy import dendrogram as scipy_dendrogram
from scipy.cluster.hierarchy import linkage

from agglo.lab.playground.fronts import SPEED, read
from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.page.html import (
    Dendrogram,
    Plot,
    asset,
    compared_html,
    curve_html,
    cut_height,
    data_url,
    leaf_order,
    render,
    sentence,
    ticks,
)
from agglo.lab.playground.settings import choose
from agglo.lab.playground.tokens import Classifier, Tree, compare

EVIL = "<img src=x onerror=alert(1)>"


def test_small_images_are_exact_and_large_ones_small() -> None:
    def opened(url: str) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))

    draws = np.random.default_rng(0)
    small = draws.integers(0, 256, (28, 28, 3), dtype=np.uint8)
    assert np.array_equal(opened(data_url(small)), small)
    photo = Image.fromarray(small).resize((448, 448), Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(photo) + draws.normal(0, 12, (448, 448, 3)), 0, 255).astype(np.uint8)
    assert data_url(noisy).startswith("data:image/webp")
    assert np.abs(opened(data_url(noisy)).astype(float) - noisy).mean() < 10


def test_words_of_models_and_files_are_no_markup(classifier: Classifier) -> None:
    found = compare(classifier, chosen_image("example:boot"), [choose("atc", "average", keep_rate=0.5)])
    sides = [replace(side, title=EVIL, line=EVIL) for side in found.sides]
    answers = [replace(answer, name=EVIL) for answer in found.dense.top]
    front = read("agglo_fashion_vit-half")
    point = front.points[1]
    front = replace(front, name=EVIL, model=EVIL, where=EVIL, objective=EVIL, accuracy=None, points=(point,))
    for shown in (
        compared_html(replace(found, sides=sides, dense=replace(found.dense, top=answers))),
        curve_html(front, SPEED, 0),
        render("point", front=front, point=point, line=EVIL, applied=EVIL),
        render("error", sentence=EVIL),
    ):
        assert "<img src=x" not in shown and "&lt;img src=x" in shown


def test_scripts_make_no_markup_of_words() -> None:
    """What is escaped in an attribute is not when a script reads it."""
    for name in ("groups.js", "picker.js", "points.js"):
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", asset(name))


def test_sentences_hold_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError("checkpoint='/home/anna/deit.safetensors' has 3 names, 0.5 of 1/2 and C:\\Users\\anna\\x.pt")
    assert sentence(error) == "checkpoint='…' has 3 names, 0.5 of 1/2 and …"
    error = ValueError("model='hf:/home/anna/vit' of http://example.org/a/b or tome/atc")
    assert sentence(error) == "model='hf:…' of http://example.org/a/b or tome/atc"
    assert "/secret" not in sentence(RuntimeError("/secret/place broke")) and "/secret/place" in capsys.readouterr().err
    assert "diffusers" in sentence(ModuleNotFoundError("no", name="diffusers"))


def drawn(merges: np.ndarray, groups: int) -> Dendrogram:
    tree = Tree(torch.from_numpy(merges), groups, 3, "average", is_method=True)
    return Dendrogram(tree, np.zeros((8, 8 * (len(merges) + 1), 3), np.uint8))


@pytest.mark.parametrize("n", [2, 7, 50])
def test_the_dendrogram_is_scipys(n: int) -> None:
    merges = linkage(np.random.default_rng(0).normal(size=(n, 3)), "average")
    theirs = scipy_dendrogram(merges, no_plot=True)
    assert leaf_order(merges) == theirs["leaves"]
    groups = (n + 1) // 2
    tree = drawn(merges, groups)
    paths = [
        [float(number) for number in re.findall(r"[\d.]+", path)] for path in (tree.below + tree.above).split("M")[1:]
    ]
    mine = [(path[0] / tree.step * 10, path[3] / tree.step * 10) for path in paths]  # SciPy's leaves are 10 wide
    assert np.allclose(sorted(mine), sorted((icoord[0], icoord[3]) for icoord in theirs["icoord"]), atol=0.1 * n)
    assert tree.below.count("M") == n - groups and [leaf for leaf, _ in tree.leaves] == theirs["leaves"]
    assert (merges[:, 2] < cut_height(merges, groups)).sum() == n - groups


def test_tokens_that_are_all_the_same_have_a_tree() -> None:
    tree = drawn(linkage(np.zeros((6, 2)), "single"), 3)
    assert "nan" not in tree.below + tree.above


def test_points_are_where_their_numbers_say() -> None:
    front = read("agglo_fashion_vit-half")
    plot = Plot(front, SPEED)
    xs, ys = [point.x(SPEED) for point in front.points], [front.y(point)[0] for point in front.points]
    assert np.allclose(np.polyval(np.polyfit(xs, [plot.x(x) for x in xs], 1), xs), [plot.x(x) for x in xs], atol=0.1)
    assert plot.left < plot.x(min(xs)) < plot.x(max(xs)) < plot.right
    assert plot.top < plot.y(max(ys)) < plot.y(min(ys)) < plot.bottom
    alone = replace(front, points=front.points[:1], accuracy=None)
    assert np.isfinite(Plot(alone, SPEED).x(1.0))


@pytest.mark.parametrize(("low", "high"), [(0.9, 2.6), (-0.001, 0.03), (91.2, 91.3), (0, 1e6)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 9 and low <= found[0] and found[-1] <= high
    assert np.allclose(np.diff(found), found[1] - found[0])
