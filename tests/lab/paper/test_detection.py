"""The items of detection: cells, settings, the gate and differences; a miniature and a full run from end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import save_file

from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import FASHION, SHELF, TUNED
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.items.detection import (
    CLAIMS,
    COCO,
    DENSE_WITH_TOKEN,
    DETECTION,
    FULL,
    GATE,
    MINIATURE,
    DetectorScale,
    differences_of,
    entries,
    opened,
    published,
    start,
)
from agglo.lab.paper.output import write_output
from agglo.lab.paper.runner import run
from agglo.lab.paper.study import Result, Settings
from studies import nuclei
from tests.support.detection import SMALL_MODEL, write_coco
from tests.support.fashion import write_fashion

pytest.importorskip("faster_coco_eval")
TRAINING = {"scenes": 8, "epochs": 1, "lr_drops": [0.5], "validation_scenes": 1}
SMALL = DetectorScale(
    ("miniature",),
    FASHION,
    entries("tome", "evit"),
    shelf_rates=(0.5, 0.25),
    tuned_rates=(0.5,),
    dense=("miniature", TRAINING),
    tuned=("miniature", TRAINING),
    validation=2,
    resamples=20,
    batch_size=2,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    data = {FASHION: write_fashion(tmp_path / "fashion")}
    return Settings(miniature=True, data=data, output=tmp_path / "results", runs=tmp_path / "runs")


@pytest.fixture
def small_vit(tmp_path: Path) -> Path:
    backbone = timm.create_model(SMALL_MODEL["model"], **SMALL_MODEL["backbone_options"])
    file = tmp_path / "small.safetensors"
    save_file(backbone.state_dict(), file)
    return file


def of(results: Sequence[Result]) -> dict[Any, Result]:
    return {(r["training"], r["method"], r["keep_rate"]): r for r in results if "training" in r}


def test_cells_are_those_of_the_papers_tables() -> None:
    """Every printed number has its cell, and further ones come beside."""
    cells = [cell.about for cell in DETECTION.cells(Settings()) if "training" in cell.about]
    known = {(cell["model"], cell["training"], cell["method"], cell["keep_rate"]) for cell in cells}
    for model, trainings in printed.table("detection")["values"].items():
        for training, methods in trainings.items():
            for method, values in methods.items():
                rates = [None] if method == DENSE else [float(rate) for rate in values]
                where = SHELF if method == DENSE else training
                assert all((model, where, method, rate) in known for rate in rates), (model, training, method)
    tuned = [cell for cell in cells if cell["training"] == TUNED]
    assert len(tuned) == 2 * 4 * 10 and {cell["keep_rate"] for cell in tuned} == {0.25, 0.5, 0.7, 0.9}
    assert {cell["method"] for cell in cells if cell["keep_rate"] is None} == {DENSE, DENSE_WITH_TOKEN}


def test_needs_of_a_full_run(tmp_path: Path) -> None:
    """A published detector serves where no class token is asked; the others are trained from DeiT's weights."""

    def needs(weights: dict[str, Path], method: str) -> set[str]:
        cells = DETECTION.cells(Settings(weights=weights))
        chosen = [cell for cell in cells if (cell.about.get("method"), cell.about["model"]) == (method, "tiny")]
        return {need.name for cell in chosen for need in cell.needs}

    given = {published("tiny"): tmp_path}
    assert needs({}, "tome") == needs({}, "evit") == needs(given, "evit") == {COCO, start("tiny")}
    assert needs(given, "tome") == {COCO, published("tiny")}


def test_settings_of_every_training(tmp_path: Path) -> None:
    deit, dense = tmp_path / "deit.safetensors", tmp_path / "dense.safetensors"
    about = {"model": "small", "method": DENSE, "keep_rate": None, "seed": 3}
    full = FULL.training(about, deit, dense=True)
    assert (full.epochs, full.lr_drops, full.seed, full.dataset) == (36, [27, 33], 3, "coco") and not full.class_token
    for rate, entry in [(rate, entry) for training, rate, entry in FULL.reduced if (training, rate) == (TUNED, 0.7)]:
        tuned = FULL.training({**about, "method": entry.name, "keep_rate": rate}, dense)
        assert (tuned.epochs, tuned.lr, tuned.weight_decay, tuned.keep_rate) == (4, 1e-5, 1e-6, rate)
        assert tuned.class_token == (entry.method in ("evit", "ats", "evovit")) and tuned.checkpoint == str(dense)
        assert (tuned.method, tuned.linkage) == (entry.method, entry.options.get("linkage"))
    mini = MINIATURE.training({**about, "model": "miniature"}, None, dense=True)
    assert (mini.scenes, mini.epochs, mini.lr_drops) == (4000, 4, [2.75, 3.75]) and mini.from_scratch


def test_claims_hold_in_the_papers_tables() -> None:
    """That is what they are: above 0 for both detectors, boxes and masks."""
    for name, first, second in CLAIMS:
        for model in ("tiny", "small"):
            for kind in ("box", "mask"):
                values = [printed.value("detection", model, *case, kind) for case in (first, second)]
                assert values[0] > values[1], (name, model, kind)
    for scale, miniature in ((FULL, False), (MINIATURE, True)):
        cells = [cell.about for cell in DETECTION.cells(Settings(miniature=miniature))]
        known = {(about.get("training"), about.get("method"), about.get("keep_rate")) for about in cells}
        names = [name for name, *_ in differences_of(scale)]
        assert all(case in known for _, *pair in differences_of(scale) for case in pair)
        assert len(set(names)) == len(names) and not {claim.name for claim in CLAIMS}.isdisjoint(names)


def result(model: str, training: str, method: str, rate: float | None, seed: int, box: float, **more: Any) -> Result:
    about = {"model": model, "training": training, "method": method, "keep_rate": rate, "seed": seed}
    numbers = {"box_AP": box, "mask_AP": box - 2, "gflops": 0.1, "images": 9}
    return {"cell": about, **about, **numbers, **more, "processor": "p", "date": "2026-11-17"}


def test_tables_of_a_miniature(settings: Settings) -> None:
    found = []
    for seed in (0, 1):
        found += [
            result("miniature", SHELF, DENSE, None, seed, 40.0 + seed),
            result("miniature", GATE, "one token", None, seed, 20.0),
            *(result("miniature", SHELF, "atc average", rate, seed, 36 + seed) for rate in (0.5, 0.25)),
        ]
    folder = write_output(DETECTION, found, settings)
    page = (folder / "tables.md").read_text()
    assert "| atc average | 36.50 (0.71) | 43.70 | 36.50 (0.71) | 33.80 |" in page, "measured beside what is printed"
    assert "printed (not comparable)" in page and "50% difference" not in page
    assert "Dense: 40.50 (0.71). One token: 20.00 (0.00)." in page
    assert (folder / "ap.png").read_bytes().startswith(b"\x89PNG")


def test_tables_of_a_full_run(settings: Settings) -> None:
    found = [
        result("tiny", SHELF, DENSE, None, 0, 45.5, box_error=0.3, mask_error=0.4),
        result("tiny", SHELF, "atc average", 0.5, 0, 43.0, box_error=0.3, mask_error=0.4),
        result("tiny", TUNED, "svit", 0.7, 0, 45.0, box_error=0.3, mask_error=0.4),
    ]
    page = (write_output(DETECTION, found, replace(settings, miniature=False)) / "tables.md").read_text()
    assert "Dense: 45.50 (printed: 45.8)." in page
    assert "| atc average | 43.00 | 43.70 | -0.70 +- 0.30 (ours alone) |" in page
    assert "1 of 1 cells differ from what is printed by more than two standard errors" in page
    assert "| svit | 43.00 | 39.40 | +3.60 +- 0.40 (ours alone) |" in page and "SViT's own repository has 40.7" in page


def test_a_miniature_from_end_to_end(settings: Settings) -> None:
    item = replace(DETECTION, miniature=SMALL)
    found = run(item, settings)
    results = of(found.results)
    assert not found.left_out and len(found.results) == len(item.cells(settings))
    assert [results[SHELF, name, rate]["tokens"] for name, rate in (("dense", None), ("tome", 0.5))] == [196, 25]
    assert "pairs" in results[SHELF, "tome", 0.25]["cannot"] and 0 <= results[TUNED, "evit", 0.5]["mask_AP"] <= 100
    differences = {r["difference"]: r for r in found.results if "difference" in r}
    assert "cannot" in differences["off the shelf: tome 25% to dense"]
    apart = results[TUNED, "evit", 0.5]["box_AP"] - results[TUNED, DENSE, None]["box_AP"]
    assert differences["fine-tuned: evit 50% to dense"]["box"]["value"] == pytest.approx(apart)
    # A record that lost cells is completed: a cell from its weights, a difference from resamples, or from a cell
    # that is judged again where its resamples are gone.
    path = settings.folder(item.name) / "record.json"
    content = json.loads(path.read_text())
    gone = [r for r in content["results"] if r.get("method") == "evit" and r["keep_rate"] == 0.25]
    gone += [r for r in content["results"] if r.get("difference") == "off the shelf: evit 50% to dense"]
    content["results"] = [r for r in content["results"] if r not in gone]
    path.write_text(json.dumps(content))
    for table in settings.runs.rglob("evit-0.5/*.npz"):
        table.unlink()
    kept = {"date", "processor"}
    again = [r for r in run(item, settings).results if r["cell"] in [r["cell"] for r in gone]]
    assert [{k: v for k, v in r.items() if k not in kept} for r in again] == [
        {k: v for k, v in r.items() if k not in kept} for r in gone
    ]


def test_a_full_run_from_end_to_end(settings: Settings, tmp_path: Path, small_vit: Path) -> None:
    """With a ViT and images that are small, by the study's recipes: dense training, off the shelf, fine-tuning."""
    quick = {**SMALL_MODEL, "image_size": 64, "workers": 0, "batch_size": 2, "warmup_steps": 1}
    quick |= {"epochs": 1, "lr_drops": [0.5]}
    methods = entries("atc average", "evit")
    how: dict[str, Any] = {"shelf_rates": (0.5,), "tuned_rates": (0.5,), "resamples": 20, "workers": 0}
    scale = DetectorScale(("tiny",), COCO, methods, dense=("dense", quick), tuned=("finetune", quick), **how)
    item = replace(DETECTION, full=scale)
    data = {COCO: write_coco(tmp_path / "coco", n_train=4, n_validation=3)}
    weights = {start("tiny"): small_vit}
    full = replace(settings, miniature=False, data=data, weights=weights)
    results = of(run(item, full).results)
    assert set(results) == {
        (SHELF, DENSE, None), (SHELF, DENSE_WITH_TOKEN, None), (SHELF, "atc average", 0.5), (SHELF, "evit", 0.5),
        (TUNED, "atc average", 0.5), (TUNED, "evit", 0.5),
    }  # fmt: skip
    assert all(r["images"] == 3 and "box_error" in r for r in results.values())
    of_dense = results[SHELF, DENSE, None]["weights"]
    assert results[TUNED, "atc average", 0.5]["weights"] == of_dense
    assert of_dense != results[TUNED, "evit", 0.5]["weights_with_token"], "which asks a class token"
    assert (
        opened(full.run_folder("detection", "tiny", "seed0", "dense") / "last" / "model.safetensors").spec.n_classes
        == 2
    )


def test_nuclei_from_end_to_end(settings: Settings, tmp_path: Path, small_vit: Path) -> None:
    [item] = nuclei.ITEMS
    choices = {**nuclei.CHOICES, **SMALL_MODEL, "image_size": 64, "warmup_steps": 1, "epochs": 2, "lr_drops": [1.6]}
    data = write_coco(tmp_path / "coco", n_train=5)
    full = replace(settings, miniature=False, data={"nuclei": data}, weights={start("tiny"): small_vit})
    cells = item.cells(full)
    few = [cell for cell in cells if cell.about["method"] in (DENSE, "one token", "tome")]
    item = replace(item, full=choices, axes=lambda scale, settings: few)
    results = {(r["part"], r["method"], r["keep_rate"]): r for r in run(item, full).results}
    assert len(cells) == 17 and results["training", DENSE, None]["images"] == {"train": 4, "validation": 1}
    assert "pairs" in results["reduced", "tome", 0.25]["cannot"] and len(results["training", DENSE, None]["log"]) == 2
    assert results["reduced", "one token", None]["tokens"] == 1
    assert "| tome | 25% | cannot | cannot |" in (full.folder("nuclei") / "tables.md").read_text()
