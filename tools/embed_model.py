"""Put a trained embedded model, and the first test images, into the package.

    agglo finetune fashion_mnist --data fashion-mnist --output runs/fashion
    python tools/embed_model.py --run runs/fashion --data fashion-mnist

Weights are stored in half precision. Images are the first of the test set, as idx files like those they come from. The
log of the run is kept in results/training.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agglo.embedded.classifier import IMAGES, WEIGHTS
from agglo.experiments.fashion_mnist import find_idx, read_idx, write_idx
from agglo.experiments.files import write_json

LOG = Path(__file__).parents[1] / "results" / "training" / "embedded-model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that `agglo finetune` wrote")
    parser.add_argument("--data", type=Path, required=True, help="folder of the four idx files")
    parser.add_argument("--images", type=int, default=1000, help="(default: %(default)s)")
    arguments = parser.parse_args()

    weights = load_file(arguments.run / "best" / "model.safetensors")
    save_file({name: value.to(torch.float16) for name, value in weights.items()}, WEIGHTS)
    IMAGES.mkdir(exist_ok=True)
    for name, dimensions in (("t10k-images-idx3-ubyte", 3), ("t10k-labels-idx1-ubyte", 1)):
        write_idx(IMAGES / f"{name}.gz", read_idx(find_idx(arguments.data, name), dimensions)[: arguments.images])
    LOG.mkdir(exist_ok=True)
    shutil.copy(arguments.run / "log.csv", LOG / "log.csv")
    settings = json.loads((arguments.run / "settings.json").read_text(encoding="utf-8"))
    write_json(LOG / "settings.json", {name: value for name, value in settings.items() if name != "data"})
    WEIGHTS.chmod(0o644)
    for path in (WEIGHTS, *sorted(IMAGES.iterdir()), *sorted(LOG.iterdir())):
        print(f"{path.stat().st_size:>9,} bytes  {path}")


if __name__ == "__main__":
    main()
