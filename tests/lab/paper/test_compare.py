"""What differs from print is told, by whatever errors are known."""

from __future__ import annotations

from agglo.lab.paper.compare import Value, comparison, disagreements, remarks

MEASURED = {"near": Value(50.2, 0.3), "far": Value(48.0, 0.3), "bare": Value(47.0), "none": "cannot"}
PRINTED = {"near": Value(50.0), "far": Value(50.0), "bare": Value(50.0), "none": Value(50.0)}


def test_without_an_error_of_the_papers_ours_counts_alone() -> None:
    rows = list(MEASURED)
    table = comparison(rows, [0], lambda row, _: MEASURED[row], lambda row, _: PRINTED[row])
    assert [row[3] for row in table.rows] == ["+0.20 +- 0.30 (ours alone)", "-2.00 +- 0.30 (ours alone)", "-3.00", ""]
    said = disagreements(rows, [0], lambda row, _: MEASURED[row], lambda row, _: PRINTED[row])
    assert said == (
        "1 of 2 cells differ from what is printed by more than two standard errors; of 1 cells no error is known"
    )


def test_with_both_errors_both_count() -> None:
    wide = {row: Value(value.number, 1.0) for row, value in PRINTED.items()}
    said = disagreements(["near", "far"], [0], lambda row, _: MEASURED[row], lambda row, _: wide[row])
    assert said == "0 of 2 cells differ from what is printed by more than two standard errors"


def test_where_nothing_is_printed_that_is_said() -> None:
    assert "prints nothing" in remarks(["near"], [0], lambda row, _: MEASURED[row], lambda row, _: None)
    assert "0 of 1 cells" in remarks(["near"], [0], lambda row, _: MEASURED[row], lambda row, _: PRINTED[row])
    assert disagreements(["near"], [0], lambda row, _: MEASURED[row], lambda row, _: None) == ""
