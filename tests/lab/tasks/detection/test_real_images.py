"""Real COCO images, with the annotations they came with: training, evaluation and figures run on them."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from agglo.lab.cli import main
from agglo.lab.tasks.detection.training.trainer import train_detector
from tests.support.data import data_path
from tests.support.detection import quick_detection
from tests.support.fashion import log


def test_real_coco_images(tmp_path: Path) -> None:
    data = data_path("coco128")
    settings = quick_detection(
        images=4, epochs=6, batch_size=4, lr_batch=4, lr=2e-3, lr_drops=[], image_size=96, evaluate_every=3, flip=0.0
    )
    train_detector(settings, data, tmp_path / "run")
    first, last = log(tmp_path / "run")
    assert float(last["train_loss"]) < 0.8 * float(first["train_loss"])
    common = ["--device", "cpu", "--method", "atc", "--keep-rate", "0.5"]
    where = ["--data", str(data), "--split", "train", "--images", "3", "--workers", "0", "--turns", "0"]
    out = tmp_path / "found.json"
    assert main(["detect", "evaluate", str(tmp_path / "run"), *where, *common, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["data"]["classes"] == 80 and [r["images"] for r in report["results"]] == [3, 3]
    image = next(path for path in sorted((data / "images").iterdir()) if path.suffix == ".jpg")
    sheet = tmp_path / "shown.jpg"
    assert main(["detect", "show", str(image), "--model", str(tmp_path / "run"), *common, "-o", str(sheet)]) == 0
    assert Image.open(sheet).width > 2 * Image.open(image).width
