"""The items of synthesis: their grids, a miniature and a full run from end to end, their tables, a U-Net's weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from agglo.embedded import classifier as embedded
from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import FASHION
from agglo.lab.paper.items.diffusion import (
    DIFFUSION_FID,
    DIFFUSION_SAMPLES,
    FULL,
    PIPELINE,
    SHOWN,
    GeneratorScale,
    first_of_each_class,
    real_images,
    reductions,
)
from agglo.lab.paper.output import write_output
from agglo.lab.paper.paths import find
from agglo.lab.paper.runner import run
from agglo.lab.paper.study import Settings
from agglo.lab.tasks.classification.data import ClassificationData, Files
from agglo.lab.tasks.synthesis.evaluation.fid import classifier_features
from studies import diffusion, studies, terrain
from tests.support.data import data_path
from tests.support.diffusion import save_dit_pipeline

pytest.importorskip("diffusers")
SMALL = GeneratorScale((0.5,), 1, 2, steps=2, guidance=1.0, batch_size=10, reference=30, embedded=True)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    places = {"data": {FASHION: embedded.IMAGES}, "output": tmp_path / "results", "runs": tmp_path / "runs"}
    return Settings(miniature=True, **places)  # type: ignore[arg-type]


def test_every_reduction_is_at_every_keep_rate() -> None:
    assert len(FULL.reductions) == 1 + 6 * 7
    cells = reductions(diffusion.KEPT, [0.7, 0.5])
    assert len({cell.config for cell in cells.values()}) == len(cells) == 2 * len(diffusion.KEPT)
    assert all(cell.config is not None and cell.config.keep_rate == rate for (_, rate), cell in cells.items())


def test_the_papers_protocol() -> None:
    tome = FULL.reductions["tome", 0.4]
    assert tome.config is not None and tome.config.options["use_rand"] is False, (
        "the paper's ToMe most likely kept the first token of each cell"
    )
    papers = [name for name, rate in FULL.reductions if (rate == 0.4 and not name.startswith("atc")) or "paper" in name]
    assert all(printed.value("diffusion", name.removesuffix("-paper").replace("-", " "), 0.4) for name in papers)
    requests = FULL.requests(0)
    assert len(requests) == 2000 and (FULL.steps, FULL.guidance, FULL.reference) == (50, 7.5, 5000)
    assert {request.name: request.seed for request in requests}["18_1"] == 181
    pictures = FULL.shown()
    assert [picture.name for picture in pictures] == list(SHOWN)
    assert [picture.seed for picture in pictures] == [181, 4121, 7751, 9690]
    assert "magpie" in pictures[0].prompt and "eggnog" in pictures[3].prompt


def test_distances_from_end_to_end(settings: Settings) -> None:
    from scipy.linalg import sqrtm

    item = replace(DIFFUSION_FID, miniature=SMALL)
    found = run(item, settings)
    done = {(r["method"], r["keep_rate"], r["seed"]): r for r in found.results}
    assert len(done) == 2 * (1 + 4 + 3) and {cell.about["features"] for cell in found.left_out} == {"inception"}
    # The distance by its textbook formula, from the files of the images.
    looking = classifier_features()
    real = looking(list(real_images(settings, SMALL))).double().numpy()
    files = sorted((settings.run_folder("diffusion-fid") / "set1" / "atc-average-paper_keep0.5").glob("*.png"))
    made = looking([Image.open(file) for file in files]).double().numpy()
    means, covariances = ([f(x) for x in (real, made)] for f in (lambda x: x.mean(0), lambda x: np.cov(x.T)))
    root = sqrtm(covariances[0] @ covariances[1] + 1e-10 * np.eye(len(means[0]))).real
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert len(files) == 10 and len(real) == 30
    assert done["atc-average-paper", 0.5, 1]["distance"] == pytest.approx(expected, rel=1e-3)
    # What is lost of a record is measured again, from the images that are there, and comes out the same.
    record = settings.folder(item.name) / "record.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "results": content["results"][:-2]}))
    times = {file: file.stat().st_mtime_ns for file in settings.runs.rglob("*.png")}
    again = {(r["method"], r["keep_rate"], r["seed"]): r for r in run(item, settings).results}
    assert {key: r["distance"] for key, r in again.items()} == {key: r["distance"] for key, r in done.items()}
    assert times == {file: file.stat().st_mtime_ns for file in settings.runs.rglob("*.png")}
    page = (settings.folder(item.name) / "tables.md").read_text()
    assert "50% printed (not comparable)" in page and "50% difference" not in page and "by inception" not in page
    of_dense = np.mean([done["dense", None, seed]["distance"] for seed in (0, 1)])
    assert f"| tome | {of_dense:.2f} (" in page


def test_a_full_table_has_differences(settings: Settings) -> None:
    about = {"features": "inception", "seed": 0, "images": 2000, "reference_images": 5000}
    measured = [("dense", None, 33.9), ("atc-average-paper", 0.5, 33.16), ("atc-average", 0.5, 33.0)]
    results = [{"method": name, "keep_rate": rate, "distance": value, **about} for name, rate, value in measured]
    folder = write_output(DIFFUSION_FID, results, replace(settings, miniature=False))
    page = (folder / "tables.md").read_text()
    assert "| atc-average-paper | 33.90 | 33.80 | +0.10 | 33.16 | 33.36 | -0.20 |" in page
    assert "not in the paper" in page and "| atc-average | 33.90 | 33.00 |" in page and "| -0.74 |" in page


def test_real_images_of_imagenet_are_the_first_of_each_class(tmp_path: Path) -> None:
    names = ["n1/c.jpg", "n2/b.jpg", "n1/a.jpg", "n2/a.jpg", "n1/b.jpg"]
    listing = ClassificationData(["n1", "n2"], Files(tmp_path, names), [0, 1, 0, 1, 0])
    assert first_of_each_class(listing, 2) == [2, 4, 3, 1]
    with pytest.raises(ValueError, match="class 'n2'"):
        first_of_each_class(listing, 3)


@pytest.mark.parametrize("miniature", [True, False], ids=["miniature", "full"])
def test_samples_from_end_to_end(miniature: bool, settings: Settings, tmp_path: Path) -> None:
    """The full run is of a pipeline of random weights, that has ImageNet's classes."""
    scale = replace(SMALL, per_class=2)
    full = replace(scale, guidance=7.5, batch_size=1, tome={"use_rand": False}, embedded=False)
    item = replace(DIFFUSION_SAMPLES, full=full, miniature=scale)
    if not miniature:
        folder = save_dit_pipeline(tmp_path / PIPELINE)
        weights = find("weights", [str(tmp_path)], [item], False)
        assert weights == {PIPELINE: folder} == find("weights", [str(folder)], [item], False)
        settings = replace(settings, miniature=False, data={}, weights=weights)
    results = {(r["method"], r["keep_rate"]): r for r in run(item, settings).results}
    assert len(results) == 8 and results["dense", None]["error"] == 0
    images = settings.run_folder(item.name)
    for method in ("tome", "atc-single-paper", "atc-average"):
        errors = []
        for picture in item.scale(settings.miniature).shown():
            ours, dense = (
                np.asarray(Image.open(images / name / f"{picture.name}.png"), dtype=float)
                for name in (f"{method}_keep0.5", "dense")
            )
            errors.append(np.linalg.norm(ours - dense) / np.linalg.norm(dense))
        assert results[method, 0.5]["error"] == pytest.approx(np.mean(errors), rel=1e-4) and np.mean(errors) > 0
    folder = settings.folder(item.name)
    sheets = sorted(path.name for path in folder.glob("*.png"))
    names = sorted(picture.name for picture in item.scale(settings.miniature).shown())
    assert sheets == [*(f"samples-{name}.png" for name in names), "samples.png"]
    side = 112 if miniature else 96
    assert Image.open(folder / "samples.png").size[0] > 8 * side, "dense and seven ways side by side"
    assert results["tome", 0.5]["generator"]["model"] == ("agglo_fashion_dit" if miniature else PIPELINE)


def test_options_from_end_to_end(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion, "PREDICTED", 4)
    monkeypatch.setattr(diffusion, "REQUESTS", diffusion.REQUESTS[::25])
    item = studies()["diffusion-options"]
    cells = [cell for cell in item.cells(settings) if cell.about["keep_rate"] == 0.5]
    few = [cell for cell in cells if cell.about["method"] in ("atc-average", "pool")]
    results = {(r["part"], r["method"]): r for r in run(replace(item, axes=lambda *_: few), settings).results}
    assert len(cells) == 35 and len(results) == 4
    for part in ("prediction", "sampling"):
        assert 0 < results[part, "atc-average"]["error"] < results[part, "pool"]["error"]
    assert len(results["prediction", "pool"]["by_level"]) == 3
    page = (settings.folder(item.name) / "tables.md").read_text()
    assert f"| pool | {100 * results['prediction', 'pool']['error']:.1f} |" in page


def test_successive_steps_of_the_terrain_unet() -> None:
    """Of random weights: clusterings are counted as the options say."""
    torch.manual_seed(0)
    model = terrain.Terrain().eval()
    clean, difficulty = torch.rand(1, 1, 32, 32) - 0.5, torch.tensor([0.5])
    path = terrain.successive(model, clean, difficulty, [1.0, 0.8, 0.6])
    cell = terrain.PARTS["successive steps"]["atc-average, shared by the blocks, kept for 5 steps", 0.5]
    [error], clusterings = terrain.errors_over_steps(model, cell, [path])
    assert error > 0 and clusterings == 0.5


def test_every_weight_of_the_terrain_unet_has_its_own_name() -> None:
    layers = {key.rpartition(".")[0] for key in terrain.Terrain().state_dict()}
    names = Counter(terrain.theirs(layer) for layer in layers)
    assert all(count == (3 if name.endswith("qkv") else 1) for name, count in names.items())


def test_the_terrain_unet_is_that_of_its_file() -> None:
    pytest.importorskip("onnxruntime")
    terrain.load(data_path("terrain/terrain_consistency_unet_difficulty100.onnx"))  # compares with ONNX Runtime
