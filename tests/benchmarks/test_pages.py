"""Pages of the documentation hold what the committed results say."""

from __future__ import annotations

import json

from agglo.bench.model_report import table as speed_table
from benchmarks import clustering_table, mini_study, mini_study_report
from benchmarks.off_the_shelf_table import PAGE, RESULTS, tables


def test_off_the_shelf() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shelf = json.loads((RESULTS / "off-the-shelf.json").read_text(encoding="utf-8"))
    speed = json.loads((RESULTS / "model.json").read_text(encoding="utf-8"))
    assert tables(shelf) in page
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
