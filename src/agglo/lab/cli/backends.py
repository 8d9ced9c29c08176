"""Show which implementations of the clustering run on this machine, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

from agglo.clustering import backends
from agglo.utils.tables import Column, Table


@dataclass(frozen=True)
class Options:
    """There are none."""


def run(options: Options) -> None:
    rows = [[status.name, "usable" if status.usable else "no", status.note] for status in backends()]
    print(Table([Column(title, left=True) for title in ("backend", "here", "note")], rows).text())
