"""The clustering's speed against its peers and beside busy processes, written into docs/clustering.md.

make bench-clustering
make clustering-page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agglo.bench.clustering import Case, goals, table
from agglo.bench.contention import Contention, report
from benchmarks.marks import write_between_marks

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "clustering.md"


def against_peers(recorded: dict[str, Any]) -> str:
    """The table, where it was measured, what memory it took, and how many goals were met."""
    cases = [Case(**case) for case in recorded["cases"]]
    judged = goals(cases)
    missed = [line.removeprefix("MISSED: ") for line in judged if line.startswith("MISSED")]
    memory = "; ".join(f"{linkage} {share:.2f}" for linkage, share in recorded["peak_memory"].items())
    return (
        f"{where(recorded)}\n\n{table(cases)}\n\n"
        f"Peak memory beside the input at the largest N, in distance matrices: {memory}.\n"
        f"Goals met: {len(judged) - len(missed)} of {len(judged)}; short of them: {'; '.join(missed) or 'none'}."
    )


def contended(recorded: dict[str, Any]) -> str:
    return f"{where(recorded)}\n\n{report([Contention(**result) for result in recorded['contention']], bullet='- ')}"


def where(recorded: dict[str, Any]) -> str:
    machine = recorded["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date'][:10]}."


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def main() -> None:
    write_between_marks(PAGE, "peers", against_peers(load("clustering.json")))
    write_between_marks(PAGE, "contention", contended(load("clustering-contended.json")))


if __name__ == "__main__":
    main()
