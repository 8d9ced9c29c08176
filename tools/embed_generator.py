"""Put a trained generator into the package.

    agglo train-generator --data fashion-mnist --output runs/generator --precision bf16
    python tools/embed_generator.py --run runs/generator

Weights are stored in half precision. The log of the run is kept in results/training.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agglo.embedded.generator import WEIGHTS, trained
from agglo.experiments.files import write_json

LOG = Path(__file__).parents[1] / "results" / "training" / "embedded-generator"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that `agglo train-generator` wrote")
    run = parser.parse_args().run

    best = run / "best" / "model.safetensors"
    trained(best)  # raises unless it fits
    save_file({name: value.to(torch.float16) for name, value in load_file(best).items()}, WEIGHTS)
    WEIGHTS.chmod(0o644)
    LOG.mkdir(exist_ok=True)
    shutil.copy(run / "log.csv", LOG / "log.csv")
    settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))
    write_json(LOG / "settings.json", {name: value for name, value in settings.items() if name != "data"})
    for path in (WEIGHTS, *sorted(LOG.iterdir())):
        print(f"{path.stat().st_size:>9,} bytes  {path}")


if __name__ == "__main__":
    main()
