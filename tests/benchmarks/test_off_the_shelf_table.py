"""docs/off-the-shelf.md holds what the committed results say."""

from __future__ import annotations

import json

from agglo.bench.model_report import table as speed_table
from benchmarks.off_the_shelf_table import PAGE, RESULTS, tables


def test_the_page_is_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shelf = json.loads((RESULTS / "off-the-shelf.json").read_text(encoding="utf-8"))
    speed = json.loads((RESULTS / "model.json").read_text(encoding="utf-8"))
    assert tables(shelf) in page
    assert all(line in page for line in speed_table(speed).splitlines())
