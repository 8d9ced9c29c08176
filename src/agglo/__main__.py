"""Run the command line: python -m agglo."""

from agglo.lab.cli import main

raise SystemExit(main())
