"""Put a trained miniature detector into the package.

    make mini-detection
    python tools/embed_detector.py --run runs/mini-detection/seed0/dense

Any run of `agglo detect train miniature` will do. The last weights are taken, as the study judges them, and stored in
half precision. The log of the run is kept in results/training.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from agglo.detection.specs import open_detector
from agglo.embedded.detector import WEIGHTS
from agglo.experiments.files import save_weights, write_json

LOG = Path(__file__).parents[1] / "results" / "training" / "embedded-detector"


def embed(run: Path, weights: Path = WEIGHTS, log: Path = LOG) -> None:
    """weights: the file to write. log: the folder for the log of the run."""
    if not (run / "result.json").is_file():
        raise ValueError(f"run={str(run)!r} holds no finished run of `agglo detect train`")
    opened = open_detector(str(run / "last" / "model.safetensors"))  # raises unless it fits
    if opened.learned:
        raise ValueError(f"run={str(run)!r} was trained with a method that learned something; a dense run is accepted")
    half = {
        name: value.to(torch.float16) if value.is_floating_point() else value
        for name, value in opened.model.state_dict().items()
    }
    if infinite := [name for name, value in half.items() if not value.isfinite().all()]:
        raise ValueError(f"run={str(run)!r}: {infinite[0]} is beyond half precision")
    save_weights(weights, half, opened.spec.about())
    log.mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "log.csv", log / "log.csv")
    settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))
    write_json(log / "settings.json", {name: value for name, value in settings.items() if name != "data"})
    for path in (weights, *sorted(log.iterdir())):
        print(f"{path.stat().st_size:>9,} bytes  {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that `agglo detect train` wrote")
    embed(parser.parse_args().run)


if __name__ == "__main__":
    main()
