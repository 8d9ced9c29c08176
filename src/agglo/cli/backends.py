"""agglo backends"""

from __future__ import annotations

import argparse
from typing import Any

from agglo.clustering import backends


def add_to(commands: Any) -> None:
    about = "which implementations of the clustering run on this machine, and why the others do not"
    commands.add_parser("backends", help=about, description=about).set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    for status in backends():
        print(f"{status.name:<10} {'usable' if status.usable else 'no':<7} {status.note}")
