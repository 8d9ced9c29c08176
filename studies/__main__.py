"""Run a study: python -m studies [NAME] [--data ...] [--weights ...]."""

from __future__ import annotations

import argparse

from agglo.checks import choice
from agglo.lab.cli.reproduce import Options, run_items
from agglo.lab.options import add_options, matching
from studies import studies


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies", description="Without NAME: all studies, and what each needs."
    )
    add_options(parser, Options)
    options = Options(**matching(Options, parser.parse_args()))
    every = studies()
    name = options.item
    run_items(options, list(every.values()), None if name in (None, "all") else every[choice("study", name, every)])


if __name__ == "__main__":
    main()
