"""SVG pictures: the tree of a clustering, and curves whose points can be clicked."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from scipy.cluster.hierarchy import dendrogram as scipy_dendrogram
from scipy.cluster.hierarchy import linkage

from agglo.drawing.dendrogram import arches, cut_height, dendrogram, leaf_order
from agglo.drawing.scatter import Axis, Dot, scatter


def tree(n: int, seed: int = 0, method: str = "average") -> np.ndarray:
    return linkage(np.random.default_rng(seed).normal(size=(n, 3)), method)


@pytest.mark.parametrize("n", [2, 3, 7, 50])
def test_leaves_and_arches_are_scipys(n: int) -> None:
    merges = tree(n)
    drawn = scipy_dendrogram(merges, no_plot=True)
    assert leaf_order(merges) == drawn["leaves"]
    theirs = sorted(
        ((left - 5) / 10, (right - 5) / 10, *heights)
        for (left, _, _, right), heights in zip(drawn["icoord"], drawn["dcoord"], strict=True)
    )
    mine = sorted((a.left, a.right, a.left_height, a.height, a.height, a.right_height) for a in arches(merges))
    assert np.allclose(mine, theirs)


@pytest.mark.parametrize("groups", [1, 2, 9, 20])
def test_the_cut_lies_between_the_merges(groups: int) -> None:
    merges = tree(20)
    height = cut_height(merges, groups)
    assert (merges[:, 2] < height).sum() == 20 - groups or groups == 20


@pytest.mark.parametrize("groups", [1, 5, 30])
def test_the_svg_holds_every_merge_and_leaf_once(groups: int) -> None:
    merges = tree(30)
    root = ET.fromstring(dendrogram(merges, groups, [f"#0000{n:02x}" for n in range(30)], "a tree"))
    below, above = (root.find(f"path[@class='{name}']").get("d").count("M") for name in ("below", "above"))  # type: ignore[union-attr]
    assert (below, above) == (30 - groups, groups - 1)
    leaves = root.findall("rect")
    assert [int(leaf.get("data-leaf", "")) for leaf in leaves] == leaf_order(merges)
    assert all(leaf.get("fill") == f"#0000{int(leaf.get('data-leaf', '')):02x}" for leaf in leaves)


def test_tokens_that_are_all_the_same() -> None:
    merges = linkage(np.zeros((6, 2)), "single")
    assert "nan" not in dendrogram(merges, 3, ["#000000"] * 6, "same")


def test_points_are_where_their_numbers_say() -> None:
    dots = [
        Dot("atc", 1.0, 90.0, 0.5, "one"),
        Dot("tome", 2.0, 80.0, 0.0, 'two & "three"'),
        Dot("atc", 3.0, 85.0, 1.0, "x"),
    ]
    svg = scatter(dots, "speed", "accuracy", "a curve", chosen=1, level=91.0)
    points = [(float(x), float(y)) for x, y in re.findall(r'class="dot" cx="([\d.]+)" cy="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x0 < x1
    assert y0 < y2 < y1 and (y1 - y0) == pytest.approx(2 * (y2 - y0), abs=0.3)
    root = ET.fromstring(svg)
    assert [each.get("class") for each in root.iter("g")] == ["point", "point lit", "point"]
    assert svg.count('class="curve"') == 2


def test_one_point_alone_has_room() -> None:
    assert "nan" not in scatter([Dot("atc", 1.0, 2.0, 0.0, "alone")], "x", "y", "one")


@pytest.mark.parametrize(("low", "high"), [(0.9, 2.6), (-0.001, 0.03), (91.2, 91.3), (0, 1e6)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = Axis(low, high).ticks()
    assert 2 <= len(ticks) <= 9 and all(low <= tick <= high for tick in ticks)
    steps = np.diff(ticks)
    assert np.allclose(steps, steps[0])
