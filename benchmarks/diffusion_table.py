"""A denoising step of Stable Diffusion 1.5's architecture, written into docs/synthesis.md.

make bench-diffusion
make diffusion-page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agglo.bench.diffusion_report import body, headlines, is_finished, notes
from benchmarks.marks import replace_between_marks

RECORD = Path(__file__).parent / "results" / "diffusion.json"
PAGE = Path(__file__).parents[1] / "docs" / "synthesis.md"
MARK = "diffusion"
_PLACE = f"\n<!-- {MARK}: make diffusion-page -->\n<!-- end of {MARK} -->\n"


def text(record: dict[str, Any]) -> str:
    """The table, where it was measured, and what it tells."""
    if not is_finished(record):
        raise ValueError(f"the run of {RECORD.name} is unfinished: make bench-diffusion goes on with it")
    what, where = headlines(record)
    return "\n\n".join([f"{what}; {where}.", body(record).markdown(), "\n".join(f"- {line}" for line in notes(record))])


def with_table(page: str, record: dict[str, Any]) -> str:
    """A page with the table of a record; at its end if it has no place for it yet."""
    return replace_between_marks(page if has_place(page) else page + _PLACE, MARK, text(record))


def has_place(page: str) -> bool:
    return f"<!-- {MARK}:" in page


def load() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), load()), encoding="utf-8")


if __name__ == "__main__":
    main()
