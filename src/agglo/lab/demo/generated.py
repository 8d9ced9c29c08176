"""Images by the generator that comes with agglo: the same seeds dense and with its tokens merged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

CLASSES = (0, 1, 5, 7, 8, 9)  # top, trouser, sandal, sneaker, bag, boot: what is told apart at a glance
KEEP_RATE = 0.5


def can_generate() -> bool:
    """Return whether diffusers, which has the generator's class, is installed."""
    return find_spec("diffusers") is not None


def show_generated(output: Path) -> Path:
    """Write generated.png into the output folder: one row per class, dense, with ToMe and with ATC."""
    from agglo.lab.tasks.synthesis.data.requests import fashion_requests
    from agglo.lab.tasks.synthesis.evaluation.cells import DENSE, cells_of
    from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator
    from agglo.lab.tasks.synthesis.evaluation.grid import generate
    from agglo.lab.tasks.synthesis.evaluation.sheets import contact_sheet

    output.mkdir(parents=True, exist_ok=True)
    cells = cells_of([DENSE, "tomesd", "atc"], [KEEP_RATE])
    requests = fashion_requests(1, classes=CLASSES)
    path = output / "generated.png"
    with TemporaryDirectory() as folder:
        generate(EmbeddedGenerator(), cells, requests, Path(folder), batch_size=len(requests))
        contact_sheet(Path(folder), cells, requests).save(path)
    return path
