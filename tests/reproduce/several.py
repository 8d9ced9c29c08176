"""What each of several processes runs: three cells of an item, one of them evaluated and two trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from agglo.reproduce.classifiers import FASHION
from agglo.reproduce.item import Cell, Settings
from agglo.reproduce.items.per_block import Mae
from agglo.reproduce.runner import run


class Few(Mae):
    def cells(self, settings: Settings) -> Sequence[Cell]:
        wanted = [("off the shelf", "tome"), ("fine-tuned", "tome"), ("fine-tuned", "atc single")]
        cells = [cell for cell in super().cells(settings) if cell.about["schedule"] == "constant"]
        return [cell for cell in cells if (cell.about["training"], cell.about["method"]) in wanted]


if __name__ == "__main__":
    data, output = map(Path, sys.argv[1:])
    run(Few(), Settings(miniature=True, seeds=1, data={FASHION: data}, output=output, runs=output / "runs"))
