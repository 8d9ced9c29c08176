"""Tables say what differs from print, by whatever errors are known."""

from __future__ import annotations

from dataclasses import replace

from agglo.lab.paper.compare import Comparison, Value

MEASURED = {"near": Value(50.2, 0.3), "far": Value(48.0, 0.3), "bare": Value(47.0), "none": "cannot"}
FOUND = Comparison(list(MEASURED), [0], lambda row, _: MEASURED[row], lambda row, _: Value(50.0))


def test_without_an_error_of_the_papers_ours_counts_alone() -> None:
    differences = [row[3] for row in FOUND.table().rows]
    assert differences == ["+0.20 +- 0.30 (ours alone)", "-2.00 +- 0.30 (ours alone)", "-3.00", ""]
    assert "1 of 2 cells" in FOUND.remarks() and "of 1 cells no error is known" in FOUND.remarks()


def test_with_both_errors_both_count() -> None:
    wide = replace(FOUND, rows=["near", "far"], expected=lambda row, _: Value(50.0, 1.0))
    assert "0 of 2 cells" in wide.remarks()


def test_where_nothing_is_printed_that_is_said() -> None:
    alone = replace(FOUND, expected=lambda row, _: None)
    assert "prints nothing" in alone.remarks() and len(alone.table().columns) == 2
