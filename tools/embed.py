"""Put a trained model into the package, in half precision, and the log of its run into results/training.

    agglo finetune fashion_mnist --data fashion-mnist --output runs/fashion
    python -m tools.embed classifier --run runs/fashion --data fashion-mnist

    agglo train-generator --data fashion-mnist --output runs/generator --precision bf16
    python -m tools.embed generator --run runs/generator

    make mini-detection
    python -m tools.embed detector --run runs/mini-detection/seed0/dense

The classifier also gets the first test images, as idx files like those they come from. Of a detector the last weights
are taken, as the study judges them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from agglo.embedded import DETECTOR_WEIGHTS, classifier, generator
from agglo.lab.data.fashion_mnist import find_idx, read_idx, write_idx
from agglo.lab.tasks.detection.specs import open_detector
from agglo.utils.files import save_weights, write_json

TRAINING = Path(__file__).parents[1] / "results" / "training"
TARGETS = {"classifier": classifier.WEIGHTS, "generator": generator.WEIGHTS, "detector": DETECTOR_WEIGHTS}
FOLDERS = {"classifier": "embedded-model", "generator": "embedded-generator", "detector": "embedded-detector"}
N_IMAGES = 1000


def embed_detector(run: Path, weights: Path) -> None:
    """Write the weights of a run of `agglo detect train miniature`; ValueError unless it is finished and dense."""
    if not (run / "result.json").is_file():
        raise ValueError(f"run={str(run)!r} holds no finished run of `agglo detect train`")
    opened = open_detector(str(run / "last" / "model.safetensors"))
    if opened.learned:
        raise ValueError(f"run={str(run)!r} was trained with a method that learned something; a dense run is accepted")
    save_weights(weights, _half(opened.model.state_dict()), opened.spec.about())


def keep_log(run: Path, folder: Path) -> None:
    """Copy the log and the settings of a run, but for the path of its data."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "log.csv", folder / "log.csv")
    settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))
    write_json(folder / "settings.json", {name: value for name, value in settings.items() if name != "data"})


def _half(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=FOLDERS)
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's idx files, for the classifier")
    given = parser.parse_args()
    if given.model == "detector":
        embed_detector(given.run, TARGETS["detector"])
    else:
        save_file(_half(load_file(given.run / "best" / "model.safetensors")), TARGETS[given.model])
    for name, dimensions in (("t10k-images-idx3-ubyte", 3), ("t10k-labels-idx1-ubyte", 1)) if given.data else ():
        write_idx(classifier.IMAGES / f"{name}.gz", read_idx(find_idx(given.data, name), dimensions)[:N_IMAGES])
    keep_log(given.run, TRAINING / FOLDERS[given.model])
