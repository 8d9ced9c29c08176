"""Charts: one look for each method wherever it is drawn, and the errors of points where points have them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agglo
from agglo.drawing import charts
from agglo.drawing.charts import DENSE, LOOKS, Bar, BarPanel, Curve, CurvePanel, DenseLine, in_order, looks, method_of

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

LINKAGES = [f"atc {linkage}" for linkage in ("single", "average", "complete")]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved, to look into."""
    saved: list[Any] = []
    save = Figure.savefig

    def saving(figure: Any, *arguments: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saving)
    return saved


def test_every_method_has_a_look_of_its_own() -> None:
    names = {info.name for info in agglo.list_methods()}
    assert names <= LOOKS.keys()
    drawn = [LOOKS[name] for name in sorted(names | set(LINKAGES) | {"dense", "free"}) if name != "atc"]
    assert len({look.colour for look in drawn}) == len(drawn)
    for one, other in itertools.combinations(drawn, 2):
        apart = np.abs(np.subtract(to_rgb(one.colour), to_rgb(other.colour))).max()
        assert apart > 0.1 or one.marker != other.marker


def test_variations_keep_the_colour_and_differ_in_line_and_strangers_get_further_colours() -> None:
    found = looks(["kmedoids(weights='equal')", "mine", "kmedoids", "kmedoids, linear", "yours"])
    assert len({found[name].colour for name in found if name.startswith("kmedoids")}) == 1
    assert len({found[name].line for name in found if name.startswith("kmedoids")}) == 3
    assert found["kmedoids"] == LOOKS["kmedoids"]
    known = {look.colour for look in LOOKS.values()}
    assert found["mine"].colour != found["yours"].colour and not {found["mine"].colour, found["yours"].colour} & known
    many = looks(f"stranger {number}" for number in range(20))
    assert len(set(many.values())) == 20
    assert method_of("topk2") is None and method_of("l2, keep 0.5") == "l2"
    assert in_order(["mine", "tome", "atc single", "tome"]) == ["atc single", "tome", "mine"]


def test_curves_show_the_errors_of_their_points(tmp_path: Path, figures: list[Any]) -> None:
    curve = Curve("tome", [1.0, 2.0], [70.0, 72.0], [0.5, 0.25], [(0.5, 1.5), (1.9, 2.3)])
    panels = [
        CurvePanel(
            [curve, Curve("sit", [1, 2], [60, 61], faint=True)], "x", "y", DenseLine(73.0, 0.4, 1.2, (1.1, 1.3))
        ),
        CurvePanel([Curve("mine", [1, 2], [70, 71])], "x", "y"),
    ]
    charts.draw_curves(panels, tmp_path / "a.png", title="title", note="note", share_y=True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    first, second = figures[0].axes
    dense, drawn = (c for c in first.containers if isinstance(c, ErrorbarContainer))
    assert drawn.lines[0].get_color() == LOOKS["tome"].colour and dense.lines[0].get_color() == LOOKS[DENSE].colour
    across, upright = drawn.lines[2]
    np.testing.assert_allclose(across.get_segments(), [[[0.5, 70], [1.5, 70]], [[1.9, 72], [2.3, 72]]])
    np.testing.assert_allclose(upright.get_segments(), [[[1, 69.5], [1, 70.5]], [[2, 71.75], [2, 72.25]]])
    [plain] = second.containers
    assert plain.lines[2] == ()
    [legend] = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["dense", "tome", "other methods", "mine"]


def test_rings_logarithmic_scales_and_rows_of_panels(tmp_path: Path, figures: list[Any]) -> None:
    curves = [Curve("atc", [1, 4, 1024], [50, 700, 6000]), Curve("chosen", [4], [700], ringed=True)]
    panels = [CurvePanel(curves, "batch size", "y", None, "", [1, 4, 1024], y_log=True, x_log=True)] * 3
    charts.draw_curves(panels, tmp_path / "a.png", columns=2)
    axes = figures[0].axes
    assert [ax.get_visible() for ax in axes] == [True] * 3 + [False]
    assert len({round(ax.get_position().y0, 3) for ax in axes}) == 2
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1", "4", "1024"]
    assert {"100", "1,000", "5,000"} <= {label.get_text() for label in axes[0].get_yticklabels()}
    [ring] = (line for line in axes[0].lines if line.get_fillstyle() == "none")
    assert ring.get_linestyle() == "None" and list(ring.get_xdata()) == [4]
    [legend] = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["atc", "chosen"]


def test_bars_show_their_range(tmp_path: Path, figures: list[Any]) -> None:
    groups = [
        [Bar("dense", 10, 8, 13, "10")],
        [Bar("atc average", 20, 20, 20, label="atc, 0.5"), Bar("tome", 19, 19, 19)],
    ]
    charts.draw_bars([[BarPanel(groups, "x")]], tmp_path / "a.svg")
    [axes] = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dense", "atc, 0.5", "tome"]
    [whiskers] = (c for c in axes.containers if isinstance(c, ErrorbarContainer))
    [line] = whiskers.lines[2]
    np.testing.assert_allclose([segment[:, 0] for segment in line.get_segments()], [[8, 13]])
    bottom, top = axes.get_ylim()
    assert bottom > top  # read from top to bottom
