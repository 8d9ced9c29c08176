"""The synthesis benchmarks: their grids, their tables, and the names of a U-Net's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import agglo
from agglo.experiments.randomness import generator as random_generator
from benchmarks import mini_synthesis, mini_synthesis_report, terrain_steps, terrain_unet
from tests.support.data import data_path

pytest.importorskip("diffusers")


def test_every_way_is_at_every_keep_rate() -> None:
    cells = mini_synthesis.generated_cells([0.7, 0.5])
    assert len(cells) == len({cell.name for cell in cells}) == 1 + 2 * (1 + 3 + 3)
    compared = mini_synthesis.compared_cells([0.7, 0.5])
    assert len({cell.name for cell in compared}) == len(compared)
    assert len({json.dumps(dict(cell.options), sort_keys=True) for cell in compared}) == len(compared)
    sampled = mini_synthesis.sampled_cells([0.7, 0.5])
    assert len({cell.name for cell in sampled}) == len(sampled) == len(compared) + 2 * 3


@pytest.mark.parametrize("cells", [terrain_unet.single_cells([0.7, 0.5]), terrain_steps.step_cells([0.7, 0.5])])
def test_no_cell_of_the_terrain_unet_is_there_twice(cells: list[Any]) -> None:
    assert len({cell.name for cell in cells}) == len(cells)
    assert len({json.dumps(dict(cell.options), sort_keys=True) for cell in cells}) == len(cells)


def test_steps_of_the_terrain_unet() -> None:
    """Of random weights: the path is the dense model's, and clusterings are counted as options say."""
    torch.manual_seed(0)
    model = terrain_unet.Terrain().eval()
    clean, difficulty = torch.rand(1, 1, 64, 64) - 0.5, torch.tensor([0.5])
    sigmas = terrain_steps.karras_sigmas(80.0, 0.002)
    assert len(sigmas) == 50 and sigmas[0] == pytest.approx(80) and sigmas[-1] == pytest.approx(0.002)
    assert sigmas == sorted(sigmas, reverse=True)
    path = terrain_steps.successive(model, clean, difficulty, sigmas[25:27])
    cells = [cell for cell in terrain_steps.step_cells([0.5]) if "windows" not in cell.name]
    wanted = {"": 9.0, "shared by the blocks": 1.0, "kept for 5 steps": 4.5, "kept until they drift by 0.05": None}
    chosen = {cell.name.removeprefix("atc-average").removesuffix("_keep0.5").removeprefix(", "): cell for cell in cells}
    rows = terrain_steps.errors_over_steps(model, [chosen[name] for name in wanted], [path])
    assert agglo.reduction(model) is None
    for row, clusterings in zip(rows, wanted.values(), strict=True):
        assert row["error"] > 0
        assert row["clusterings"] == clusterings or (clusterings is None and 4.5 <= row["clusterings"] <= 9)
    with torch.no_grad():
        sigma = torch.tensor([sigmas[25]])
        noisy = clean + sigmas[25] * torch.randn(clean.shape, generator=random_generator("terrain steps", sigmas[25]))
        denoised = model(noisy, sigma, difficulty)
        second = denoised + sigmas[26] / sigmas[25] * (noisy - denoised)
        assert torch.allclose(path[1](), model.predict(second, torch.tensor([sigmas[26]]), difficulty), atol=1e-5)


def test_the_tables(tmp_path: Path) -> None:
    machine = {"cpu": "some", "date": "2026-01-01T00:00:00"}
    common: dict[str, Any] = {"machine": machine, "command": "this"}
    error_rows = [{"cell": "atc-average_keep0.5", "error": 0.125}, {"cell": "tome_keep0.9", "error": 0.01}]
    distance_rows = [
        {"cell": "dense", "classifier": [2.0, 4.0]},
        {"cell": "tome_keep0.9", "classifier": [3.0, 7.0]},
    ]
    time_rows = [
        {"cell": "dense", "ms_per_image": 8.0, "of_dense": 1.0},
        {"cell": "tome_keep0.9", "ms_per_image": 6.0, "of_dense": 0.75},
    ]
    contents = {
        "errors": {"images": 4, "levels": [500], "rows": error_rows},
        "samplings": {"images": 7, "rows": [{"cell": "atc-average, kept_keep0.5", "error": 0.5}]},
        "distances": {"sets": 2, "images_per_set": 10, "reference_images": 20, "rows": distance_rows},
        "times": {"rows": time_rows},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**common, **content}))
    page = tmp_path / "page.md"
    page.write_text("before <!-- synthesis in miniature: how --><!-- end of synthesis in miniature --> after")
    mini_synthesis_report.write(tmp_path, page)
    text = page.read_text()
    assert "7 pictures" in text and "| atc-average, kept | 50.0 |" in text
    assert "| keep rate | 0.5 | 0.9 |" in text
    assert "| atc-average | 12.5 |  |" in text and "| tome |  | 1.0 |" in text
    assert "dense 3.00 ± 1.41" in text and "| tome | 5.00 ± 2.83 |" in text
    assert "| tome | +2.00 ± 1.41 |" in text and "| tome | 0.75 |" in text
    assert "Inception" not in text


def test_every_weight_of_the_terrain_unet_has_one_place() -> None:
    own = terrain_unet.Terrain().state_dict()
    names = set()
    for name, (_, kind) in terrain_unet.places().items():
        layers = [f"{name}.to_{which}" for which in "qkv"] if kind == "qkv" else [name]
        names.update(f"{layer}.{end}" for layer in layers for end in ("weight", "bias") if f"{layer}.{end}" in own)
    assert names == set(own)
    theirs = [other for other, _ in terrain_unet.places().values()]
    assert len(set(theirs)) == len(theirs)


def test_the_terrain_unet_is_that_of_its_file() -> None:
    pytest.importorskip("onnxruntime")
    path = data_path("terrain/terrain_consistency_unet_difficulty100.onnx")
    assert terrain_unet.difference_to_onnx(terrain_unet.load(path), path) < 1e-4
