"""Tables: every kind holds the same cells, and can be read back."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from agglo.utils.tables import CANNOT, Column, Table

COLUMNS = [Column("method", left=True), Column("top-1", ".2f"), Column("images", "d"), Column("note")]
ROWS = [["atc", 71.456, 2000, None], ["tome", CANNOT, None, "a|b & 50 %"], ["x_1", float("nan"), 3, True]]
TABLE = Table(COLUMNS, ROWS)


def test_latex_escapes_what_would_be_commands() -> None:
    assert TABLE.latex().splitlines() == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"method & top-1 & images & note \\",
        r"\midrule",
        r"atc & 71.46 & 2000 &  \\",
        r"tome & cannot &  & a|b \& 50 \% \\",
        r"x\_1 & nan & 3 & True \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    (_, _, title, *_) = Table([Column(r"a\b~c^{d}$#")], []).latex().splitlines()
    assert title == r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}\{d\}\$\# \\"


CELLS = st.lists(st.lists(st.text(st.sampled_from("ab|&\\\n %"), max_size=6), min_size=3, max_size=3), max_size=5)


@given(CELLS)
def test_any_cells_can_be_read_back(rows: list[list[str]]) -> None:
    table = Table([Column("one"), Column("two", left=True), Column("three")], rows)
    lines = table.markdown().splitlines()
    assert len(lines) == len(rows) + 2 and table.text().count("\n") == len(rows)
    for row, line in zip(rows, lines[2:], strict=True):
        read = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert read == [" ".join(cell.split()) for cell in row]
    assert len(table.latex().splitlines()) == len(rows) + 6
