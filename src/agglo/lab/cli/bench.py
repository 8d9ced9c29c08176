"""Measure speed."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module

from agglo.lab.paper.registry import BENCHMARKS


def add_commands(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(title="what to measure", metavar="<subject>", dest="subject", required=True)
    for name, about in BENCHMARKS.items():
        subjects.add_parser(name, help=about, load=partial(import_module, f"agglo.lab.bench.{name}"))
