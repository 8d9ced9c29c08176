"""Benchmarks: one module each, with its `Options` and `run(options)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.lab.options import AtLeastOne, option
from agglo.utils.files import require_output, write_json
from agglo.utils.machine import load_warning
from agglo.utils.tables import Table


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """The options that benchmarks share."""

    repeats: AtLeastOne = option(7, "turns of all contenders")
    threads: AtLeastOne | None = option(None, "CPU threads of torch (default: torch's)")
    json: Path | None = option(None, "every timing, the machine and the settings")

    def __post_init__(self) -> None:
        if self.json is not None:
            require_output(self.json)


def conclude(record: Mapping[str, Any], table: Table, path: Path | None) -> None:
    """Write a record, and print its table below the machine that it was measured on."""
    if path is not None:
        write_json(path, record)
    if (busy := load_warning(record["machine"])) is not None:
        print(busy)
    print(record["machine"])
    print(table.markdown())
