"""How long a move of the playground's slider takes, written into docs/playground.md.

make bench-playground
make playground-page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agglo.bench.playground import table
from benchmarks.marks import replace_between_marks

RECORD = Path(__file__).parent / "results" / "playground.json"
PAGE = Path(__file__).parents[1] / "docs" / "playground.md"
MARK = "latency"


def text(record: dict[str, Any]) -> str:
    """Where it was measured, and the table."""
    machine, moves = record["machine"], len(record["results"][0]["milliseconds"])
    where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, {machine['date'][:10]}"
    return f"`make bench-playground`, {moves} moves each, {where}:\n\n{table(record['results']).markdown()}"


def load() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def main() -> None:
    PAGE.write_text(replace_between_marks(PAGE.read_text(encoding="utf-8"), MARK, text(load())), encoding="utf-8")


if __name__ == "__main__":
    main()
