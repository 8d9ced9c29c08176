"""The embedded model is as good as its log says, and the demo shows what it promises."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from agglo.clustering import cluster
from agglo.embedded import classifier as embedded
from agglo.embedded.classifier import IMAGES, WEIGHTS
from agglo.lab.cli import main
from agglo.lab.demo import keep_rate_of, patch_colours, whole_patches
from agglo.lab.options import EMBEDDED
from agglo.lab.tasks.classification.data import open_split
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation.grid import evaluate
from agglo.models.opening import build

LOG = Path(__file__).parents[2] / "results" / "training" / "embedded-model" / "log.csv"


def test_embedded_model_is_small_and_accurate() -> None:
    model = build(EMBEDDED)
    assert len(model.blocks) == 12 and model.patch_embed.num_patches == 196
    assert 500_000 < sum(parameter.numel() for parameter in model.parameters()) < 700_000
    assert WEIGHTS.stat().st_size < 2_000_000
    images = open_split(
        "fashion-mnist", IMAGES, "val", transform=evaluation_transform(inputs_for(model, "fashion-mnist"))
    )
    assert len(images) == 1000
    found = evaluate(model, torch.utils.data.DataLoader(images, 100))
    with LOG.open() as log:
        promised = max(float(row["best_metric"]) for row in csv.DictReader(log))
    assert promised >= 90
    sampling_error = 100 * math.sqrt(promised / 100 * (1 - promised / 100) / 1000)
    assert abs(found["top1"] - promised) <= 3 * sampling_error


def test_demo_prints_a_table_and_writes_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--images", "20", "--output", str(tmp_path / "new" / "folder")]) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())["results"]
    found = {(result["name"], keep_rate_of(result)): result for result in results}
    assert len(found) == 1 + 3 + 4 * 3  # ToMe cannot do 0.25
    counts = [found[key]["counts"][-1] for key in (("dense", None), ("tome", 0.5), ("atc single", 0.25))]
    assert counts == [196, 25, 3]
    assert all((result["spread"] or 0) >= 0 and result["images_per_second"] > 0 for result in results)
    [dense] = (line.split() for line in printed.splitlines() if line.startswith("dense  "))
    [tome] = (line.split() for line in printed.splitlines() if line.startswith("tome  "))
    assert dense[-1] == "1.00x" and tome[-1] == "cannot" and len(tome) == 1 + 2 * 3 + 1
    ratio = found["tome", 0.9]["images_per_second"] / found["dense", None]["images_per_second"]
    assert tome[1:3] == [f"{found['tome', 0.9]['top1']:.1f}", f"{ratio:.2f}x"]
    for name in ("accuracy.png", "groups.png", "photo.png", "generated.png"):
        assert str(tmp_path / "new" / "folder" / name) in printed
        assert (tmp_path / "new" / "folder" / name).read_bytes().startswith(b"\x89PNG")


def test_a_photo_is_clustered_by_its_colours() -> None:
    halves = Image.new("RGB", (300, 200), "red")
    halves.paste("blue", (0, 0, 150, 200))
    image = whole_patches(halves)
    assert image.shape == (296, 448, 3)
    colours = patch_colours(image)
    assert colours.shape == (37 * 56, 6)
    torch.testing.assert_close(colours[0], torch.tensor([0.0, 0, 1, 0, 0, 0]))
    corner = torch.from_numpy(image[8:16, 16:24].copy()).double().div(255).flatten(0, 1)
    expected = torch.cat([corner.mean(dim=0), corner.std(dim=0, correction=0)]).float()
    torch.testing.assert_close(colours[56 + 2], expected)
    labels = cluster(colours, 2, "complete", metric="euclidean").view(37, 56)
    assert (labels[:, :27] == 0).all() and (labels[:, 29:] == 1).all()
    with pytest.raises(ValueError, match="3000x2"):
        whole_patches(Image.new("RGB", (3000, 2)))


def test_the_photo_comes_with_its_credits() -> None:
    credits = embedded.PHOTO.with_name("CREDITS").read_text(encoding="utf-8")
    assert {path.name for path in embedded.PHOTO.parent.iterdir()} == {"CREDITS", embedded.PHOTO.name}
    assert embedded.PHOTO.name in credits and "CC BY 2.0" in credits and "danielbuechele" in credits
