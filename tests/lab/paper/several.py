"""What each of several processes runs: two cells of a study, one of them evaluated and one trained."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from agglo.lab.paper.classifiers import FASHION
from agglo.lab.paper.items.per_block import MAE
from agglo.lab.paper.runner import run
from agglo.lab.paper.study import Settings

WANTED = [("off the shelf", "tome"), ("fine-tuned", "atc single")]

if __name__ == "__main__":
    data, output = map(Path, sys.argv[1:])
    settings = Settings(miniature=True, seeds=1, data={FASHION: data}, output=output, runs=output / "runs")
    cells = [cell for cell in MAE.cells(settings) if cell.about["schedule"] == "constant"]
    few = [cell for cell in cells if (cell.about["training"], cell.about["method"]) in WANTED]
    run(replace(MAE, axes=lambda scale, settings: few), settings)
