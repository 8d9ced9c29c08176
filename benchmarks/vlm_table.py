"""A vision-language model's time to its first token, written into docs/vlm.md.

make bench-vlm
make vlm-page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agglo.bench.vlm import body, headline, notes
from benchmarks.marks import write_between_marks

RECORD = Path(__file__).parent / "results" / "vlm.json"
PAGE = Path(__file__).parents[1] / "docs" / "vlm.md"
NAME = "vlm"


def table(record: dict[str, Any]) -> str:
    """The table, where and when it was measured, and how much of it is noise."""
    day = record["machine"]["date"].partition("T")[0]
    lines = "\n".join(f"- {line}" for line in notes(record))
    return "\n\n".join([f"{headline(record)}, {day} (`make bench-vlm`).", body(record).markdown(), lines])


def load() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def main() -> None:
    write_between_marks(PAGE, NAME, table(load()))


if __name__ == "__main__":
    main()
