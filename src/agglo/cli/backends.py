"""agglo backends"""

from __future__ import annotations

import argparse
from typing import Any

from agglo.clustering import backends
from agglo.experiments.tables import Column, Table


def add_to(commands: Any) -> None:
    about = "which implementations of the clustering run on this machine, and why the others do not"
    commands.add_parser("backends", help=about, description=about).set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    rows = [[status.name, "usable" if status.usable else "no", status.note] for status in backends()]
    print(Table([Column(title, left=True) for title in ("backend", "here", "note")], rows).text())
