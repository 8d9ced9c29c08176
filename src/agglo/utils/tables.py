r"""One table, written for a terminal, for Markdown or for LaTeX.

>>> columns = [Column("method", left=True), Column("top-1", ".2f")]
>>> table = Table(columns, [["atc", 71.5], ["tome", CANNOT], ["dense", None]])
>>> print(table.text())
method   top-1
atc      71.50
tome    cannot
dense
>>> print(table.markdown())
| method | top-1 |
|:---|---:|
| atc | 71.50 |
| tome | cannot |
| dense |  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CANNOT = "cannot"  # the cell of a method that cannot do what its row and column ask for; the reason is given elsewhere
_BETWEEN, _BAR = "  ", r"\|"
_NAMED = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_IN_LATEX = str.maketrans({**_NAMED, **{sign: rf"\{sign}" for sign in "&%$#_{}"}})


@dataclass(frozen=True)
class Column:
    """A column. form: format of its numbers, as in f-strings. left: aligned to the left."""

    title: str
    form: str = ""
    left: bool = False


@dataclass(frozen=True)
class Table:
    """A table. rows: one cell per column: text, a number to be formatted by the column, or None for an empty cell."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def text(self) -> str:
        """Return the table for a terminal: aligned columns, two spaces apart."""
        lines = self._lines()
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        return "\n".join(
            _BETWEEN.join(
                cell.ljust(width) if column.left else cell.rjust(width)
                for column, cell, width in zip(self.columns, line, widths, strict=True)
            ).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        """Return the table as GitHub's Markdown."""
        titles, *rows = (f"| {' | '.join(cell.replace('|', _BAR) for cell in line)} |" for line in self._lines())
        ruler = "|".join(":---" if column.left else "---:" for column in self.columns)
        return "\n".join([titles, f"|{ruler}|", *rows])

    def latex(self) -> str:
        """Return a tabular with the rules of the booktabs package."""
        titles, *rows = (" & ".join(cell.translate(_IN_LATEX) for cell in line) + r" \\" for line in self._lines())
        letters = "".join("l" if column.left else "r" for column in self.columns)
        head = [rf"\begin{{tabular}}{{{letters}}}", r"\toprule", titles, r"\midrule"]
        return "\n".join([*head, *rows, r"\bottomrule", r"\end{tabular}"])

    def _lines(self) -> list[list[str]]:
        """Return titles and rows as text without line breaks, which would break every kind of table."""
        written = [[_written(cell, c.form) for c, cell in zip(self.columns, row, strict=True)] for row in self.rows]
        return [[" ".join(cell.split()) for cell in line] for line in ([c.title for c in self.columns], *written)]


def _written(cell: Any, form: str) -> str:
    if cell is None:
        return ""
    is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
    return format(cell, form) if is_number else str(cell)
