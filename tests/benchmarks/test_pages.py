"""Pages of the documentation hold what the committed results say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agglo.bench.model_report import table as speed_table
from benchmarks import (
    better_tuned,
    clustering_table,
    diffusion_table,
    mini_detection_report,
    mini_study,
    mini_study_report,
    mini_synthesis_report,
    padding_effect,
    places,
    playground_table,
    ready_made,
    real_detection,
    terrain_unet,
)
from benchmarks.off_the_shelf_table import PAGE, RESULTS, better_tables, tables


def test_off_the_shelf() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shelf = json.loads((RESULTS / "off-the-shelf.json").read_text(encoding="utf-8"))
    speed = json.loads((RESULTS / "model.json").read_text(encoding="utf-8"))
    assert tables(shelf) in page
    assert better_tables(shelf) in page
    assert all(line in page for line in speed_table(speed).splitlines())


def test_clustering() -> None:
    page = clustering_table.PAGE.read_text(encoding="utf-8")
    assert clustering_table.against_peers(clustering_table.load("clustering.json")) in page
    assert clustering_table.contended(clustering_table.load("clustering-contended.json")) in page


def test_mini_study() -> None:
    shelf, tuned = (
        json.loads((mini_study.RESULTS / name).read_text(encoding="utf-8"))
        for name in ("off-the-shelf.json", "fine-tuned.json")
    )
    assert mini_study_report.page(shelf, tuned) in mini_study.PAGE.read_text(encoding="utf-8")


def test_diffusion() -> None:
    """The page has the table of the record, and no place for one while there is none."""
    page = diffusion_table.PAGE.read_text(encoding="utf-8")
    assert diffusion_table.has_place(page) == diffusion_table.RECORD.exists()
    if diffusion_table.RECORD.exists():
        assert diffusion_table.with_table(page, diffusion_table.load()) == page


def test_playground() -> None:
    """The page has the table of the record, and an empty place for it while there is none."""
    page = playground_table.PAGE.read_text(encoding="utf-8")
    if playground_table.RECORD.exists():
        assert playground_table.text(playground_table.load()) in page
    else:
        assert "<!-- latency: make playground-page -->\n<!-- end of latency -->" in page


def test_mini_synthesis() -> None:
    page = mini_synthesis_report.PAGE.read_text(encoding="utf-8")
    assert mini_synthesis_report.tables(RESULTS / "mini-synthesis") in page


def test_terrain() -> None:
    record = json.loads(terrain_unet.RESULT.read_text(encoding="utf-8"))
    assert terrain_unet.tables(record) in terrain_unet.PAGE.read_text(encoding="utf-8")


def test_mini_detection() -> None:
    """The page has the tables of the record, and no place for them while there is none."""
    page = mini_detection_report.PAGE.read_text(encoding="utf-8")
    record = mini_detection_report.RESULTS / "record.json"
    assert mini_detection_report.has_place(page) == record.exists()
    if record.exists():
        assert mini_detection_report.with_tables(page, mini_detection_report.load(record)) == page


def test_real_detection() -> None:
    page = real_detection.PAGE.read_text(encoding="utf-8")
    for part in real_detection.PARTS:
        there = real_detection.record_path(part).exists()
        assert real_detection.has_place(page, part) == there
        if there:
            assert real_detection.with_table(page, real_detection.load(part)) == page


def test_ready_made() -> None:
    assert ready_made.summary() in ready_made.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("study", [padding_effect, places, better_tuned], ids=["padding", "places", "better tuned"])
def test_small_studies(study: Any) -> None:
    """The page has the table of the record; an empty place while there is none."""
    page = study.PAGE.read_text(encoding="utf-8")
    assert f"<!-- {study.NAME}:" in page
    if study.RECORD.exists():
        assert study.table(study.load()) in page
