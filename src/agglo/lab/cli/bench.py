"""Measure speed."""

from __future__ import annotations

import argparse

from agglo.lab.paper.registry import BENCHMARKS


def add_commands(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(title="what to measure", metavar="<subject>", dest="subject", required=True)
    for benchmark in BENCHMARKS:
        subjects.add_parser(benchmark.name, help=benchmark.about, load=benchmark.load)
