"""python -m agglo"""

from agglo.cli import main

raise SystemExit(main())
