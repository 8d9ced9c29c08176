"""The items of detection: cells, settings, the gate and differences; a miniature and a full run from end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
from safetensors.torch import save_file

from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import FASHION
from agglo.lab.paper.compare import Value
from agglo.lab.paper.detection_tables import (
    BESIDES,
    CLAIMS,
    Claim,
    Term,
    claims_of,
    difference,
    draw_ap,
    lost,
    passes,
    ranks,
    tables,
    verdict,
)
from agglo.lab.paper.detectors import (
    COCO,
    COLLAPSED,
    DENSE,
    DENSE_WITH_TOKEN,
    FULL,
    GATE,
    MINIATURE,
    SHELF,
    TUNED,
    DetectorScale,
    dense_settings,
    entries,
    opened,
    published,
    start,
    tuned_settings,
)
from agglo.lab.paper.items.detection import DETECTION
from agglo.lab.paper.output import write_output
from agglo.lab.paper.runner import run
from agglo.lab.paper.study import Result, Settings
from studies import padding
from studies.real_detection import COCO_OVERFIT, ITEMS, NUCLEI, rises
from tests.support.detection import SMALL_MODEL, write_coco
from tests.support.fashion import write_fashion

pytest.importorskip("faster_coco_eval")
TRAINING = {"scenes": 8, "epochs": 1}
SMALL = DetectorScale(
    ("miniature",),
    FASHION,
    entries("tome", "evit"),
    shelf_rates=(0.5, 0.25),
    tuned_rates=(0.5,),
    class_token=True,
    tuned_dense=True,
    dense=("miniature", {**TRAINING, "validation_scenes": 2}),
    tuned=("miniature", TRAINING),
    validation=2,
    resamples=20,
    batch_size=2,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    places = {
        "data": {FASHION: write_fashion(tmp_path / "fashion")},
        "output": tmp_path / "results",
        "runs": tmp_path / "runs",
    }
    return Settings(miniature=True, **places)  # type: ignore[arg-type]


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
        return {
            name
            for cell in cells
            if (cell.about.get("method"), cell.about["model"]) == (method, "tiny")
            for name in [need.name for need in cell.needs]
        }

    given = {published("tiny"): tmp_path}
    assert needs({}, "tome") == needs({}, "evit") == needs(given, "evit") == {COCO, start("tiny")}
    assert needs(given, "tome") == {COCO, published("tiny")}


def test_settings_of_every_training(tmp_path: Path) -> None:
    deit, dense = tmp_path / "deit.safetensors", tmp_path / "dense.safetensors"
    full = dense_settings(FULL, "small", 3, class_token=False, checkpoint=deit)
    assert (full.epochs, full.lr_drops, full.seed, full.dataset) == (36, [27, 33], 3, "coco") and not full.class_token
    for entry in FULL.fine_tuned:
        tuned = tuned_settings(FULL, "small", 0, entry, 0.7, dense)
        assert (tuned.epochs, tuned.lr, tuned.weight_decay, tuned.keep_rate) == (4, 1e-5, 1e-6, 0.7)
        assert tuned.class_token == (entry.method in ("evit", "ats", "evovit")) and tuned.checkpoint == str(dense)
        assert (tuned.method, tuned.linkage) == (entry.method, entry.linkage)
    mini = dense_settings(MINIATURE, "miniature", 1, class_token=True, checkpoint=None)
    assert (mini.scenes, mini.epochs, mini.lr_drops) == (4000, 4, [2.75, 3.75]) and mini.from_scratch
    for entry in (None, *MINIATURE.fine_tuned):
        tuned = tuned_settings(MINIATURE, "miniature", 1, entry, None if entry is None else 0.5, dense)
        assert tuned.class_token and tuned.lr < mini.lr and (tuned.scenes, tuned.epochs) == (800, 1)
        assert (tuned.head_options, tuned.adapter_options) == (mini.head_options, mini.adapter_options)


def test_claims_hold_in_the_papers_tables() -> None:
    """That is what they are: above 0 for both detectors, boxes and masks."""

    def value(term: Term, model: str, kind: str) -> float:
        rate = [] if term.keep_rate is None else [term.keep_rate]
        return float(term.sign * printed.value("detection", model, term.training, term.method, *rate, kind))

    for claim in CLAIMS:
        for model in ("tiny", "small"):
            for kind in ("box", "mask"):
                assert sum(value(term, model, kind) for term in claim.terms) > 0, (claim.words, model, kind)
    known = {(cell.about.get("training"), cell.about.get("method"), cell.about.get("keep_rate"))
             for cell in DETECTION.cells(Settings(miniature=True))}  # fmt: skip
    for claim in claims_of(MINIATURE):
        assert {(term.training, term.method, term.keep_rate) for term in claim.terms} <= known
    full = {term for claim in claims_of(FULL) for term in claim.terms if term.keep_rate is None}
    assert {(term.training, term.method) for term in full} == {(SHELF, DENSE), (SHELF, DENSE_WITH_TOKEN)}
    words = [claim.words for claim in claims_of(MINIATURE)]
    assert len(set(words)) == len(words) and not {c.words for c in (*CLAIMS, *BESIDES)}.isdisjoint(words)


def test_a_difference_with_its_interval() -> None:
    random = np.random.default_rng(0)
    scenes = random.normal(0, 5, 400)  # the same for both sides: it cancels
    samples = {name: {k: ap + scenes + random.normal(0, 0.1, 400) for k in ("box", "mask")}
               for name, ap in (("a", 31.0), ("b", 30.0))}  # fmt: skip
    claim = Claim("a ahead of b", (Term(1, SHELF, "a", 0.5), Term(-1, SHELF, "b", 0.5)))
    found = difference(
        claim,
        [0, 1],
        lambda term, seed: {f"{kind}_AP": {"a": 31.0, "b": 30.0 - seed}[term.method] for kind in ("box", "mask")},
        lambda term, seed: samples[term.method],
    )
    assert found["box"]["value"] == 1.5 and found["box"]["by_seed"] == [1.0, 2.0]
    assert 0.5 < found["mask"]["low"] < 1 < found["mask"]["high"] < 1.5, "without the spread of the scenes"


@pytest.mark.parametrize(("box", "mask", "passed"), [(26.0, 25.0, True), (27.5, 20.0, False), (20.0, 26.0, False)])
def test_the_gate_wants_a_third_of_both(box: float, mask: float, passed: bool) -> None:
    noise = np.random.default_rng(0).normal(0, 0.5, 200)
    dense, collapsed = {"box_AP": 40.0, "mask_AP": 38.0}, {"box_AP": box, "mask_AP": mask}
    of_dense, of_one = ({k: ap[f"{k}_AP"] + noise for k in ("box", "mask")} for ap in (dense, collapsed))
    found = lost(dense, collapsed, of_dense, of_one)
    assert passes({"lost": found}) is passed
    assert found["box"]["share"] == pytest.approx(1 - box / 40) and found["box"]["low"] < found["box"]["share"]
    nothing = {k: np.zeros(5) for k in ("box", "mask")}
    of_nothing = lost({"box_AP": 0.0, "mask_AP": 0.0}, {"box_AP": 0.0, "mask_AP": 0.0}, nothing, nothing)
    assert not passes({"lost": of_nothing}), "a dense detector that finds nothing does not pass"


@pytest.mark.parametrize(
    ("box", "mask", "said"),
    [
        ((1, 2), (1, 2), "agrees"),
        ((-2, -1), (-2, -1), "the other way round"),
        ((-1, 1), (-1, 1), "undecided"),
        ((1, 2), (-1, 1), "only box AP: agrees"),
        ((-1, 1), (-2, -1), "only mask AP: the other way round"),
        ((1, 2), (-2, -1), "boxes and masks disagree"),
    ],
)
def test_what_intervals_say(box: tuple[float, float], mask: tuple[float, float], said: str) -> None:
    def found(*seeds: float) -> dict[str, Any]:
        """Seeds that are at these shares of the mean."""
        both = {"box": box, "mask": mask}
        return {
            kind: {
                "low": low,
                "high": high,
                "value": (low + high) / 2,
                "by_seed": [s * (low + high) / 2 for s in seeds],
            }
            for kind, (low, high) in both.items()
        }

    assert verdict(found(0.9, 1.1)) == said
    decided = said not in ("undecided", "boxes and masks disagree")
    assert verdict(found(1.0)) == (f"{said} (one seed)" if decided else said)
    for differing in ((-0.1, 2.1), (0.1, 1.9)):  # on both sides of 0, and further apart than from it
        assert verdict(found(*differing)) == ("undecided" if said == "undecided" else "undecided: seeds differ by more")


def result(model: str, training: str, method: str, rate: float | None, seed: int, box: float, **more: Any) -> Result:
    about = {"model": model, "training": training, "method": method, "keep_rate": rate, "seed": seed}
    numbers = {"box_AP": box, "mask_AP": box - 2, "gflops": 0.1, "images": 9}
    return {"cell": about, **about, **numbers, **more, "processor": "p", "date": "2026-11-17"}


def gated(share: float) -> list[Result]:
    """Two seeds of a miniature: dense, the gate, and two methods off the shelf."""
    found = []
    for seed in (0, 1):
        costs = {kind: {"share": share, "low": share, "high": share} for kind in ("box", "mask")}
        found += [
            result("miniature", SHELF, DENSE, None, seed, 40.0 + seed),
            result("miniature", GATE, COLLAPSED.name, None, seed, 40 * (1 - share), lost=costs),
            *(result("miniature", SHELF, "atc average", rate, seed, 36 + seed) for rate in (0.5, 0.25)),
            *(result("miniature", SHELF, "pool", rate, seed, 30.0 + seed) for rate in (0.5, 0.25)),
        ]
    return found


def test_tables_of_a_miniature(settings: Settings) -> None:
    folder = write_output(DETECTION, gated(0.5), settings)
    page = (folder / "tables.md").read_text()
    assert "| atc average | 36.50 (0.71) | 43.70 | 36.50 (0.71) | 33.80 |" in page, "measured beside what is printed"
    assert "printed (not comparable)" in page and "50% difference" not in page and "passed" in page
    assert "Dense: 40.50 (0.71)." in page and "| pool | 2 | 2 | 2 | 2 |" in page
    assert (folder / "ap.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_gate_nothing_is_ranked(settings: Settings) -> None:
    found = gated(0.2)
    folder = write_output(DETECTION, found, settings)
    page = (folder / "tables.md").read_text()
    assert "not ranked" in page and "not passed" in page and "atc average" not in page.split("## ")[1]
    assert "| atc average" not in page and not (folder / "ap.png").exists()
    assert "No detector came to the gate yet" in tables([found[0]], MINIATURE)[0].text
    assert draw_ap(found[:1], folder / "ap.png") == []


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
    values = {"a": Value(3.0), "b": Value(3.0), "c": "cannot"}
    assert ranks(list(values), 0.5, lambda row, rate: values[row]) == {"a": 1.5, "b": 1.5}


def test_a_miniature_from_end_to_end(settings: Settings) -> None:
    item = replace(DETECTION, miniature=SMALL)
    found = run(item, settings)
    results = of(found.results)
    assert not found.left_out and len(found.results) == len(item.cells(settings))
    assert [results[SHELF, name, rate]["tokens"] for name, rate in (("dense", None), ("tome", 0.5))] == [196, 25]
    assert "pairs" in results[SHELF, "tome", 0.25]["cannot"] and 0 <= results[TUNED, "evit", 0.5]["mask_AP"] <= 100
    assert "loses less against dense" in " ".join(r.get("difference", "") for r in found.results)
    differences = {r["difference"]: r for r in found.results if "difference" in r}
    assert "cannot" in differences["off the shelf: tome 25% to dense"]
    apart = results[TUNED, "evit", 0.5]["box_AP"] - results[TUNED, DENSE, None]["box_AP"]
    assert differences["fine-tuned: evit 50% to dense"]["box"]["value"] == pytest.approx(apart)
    # A record that lost cells is completed: a cell from its weights, a difference from match tables, or from a cell
    # that is judged again where its match tables are gone.
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


def test_the_gate_stops_a_run(settings: Settings) -> None:
    """A detector that has learned nothing loses nothing."""
    item = replace(DETECTION, miniature=replace(SMALL, gate=True))
    with pytest.raises(ValueError, match="the gate is not passed by seed 0"):
        run(item, settings)
    assert {r["training"] for r in json.loads((settings.folder(item.name) / "record.json").read_text())["results"]} == {
        SHELF, GATE,
    }  # fmt: skip


def test_a_full_run_from_end_to_end(settings: Settings, tmp_path: Path) -> None:
    """With a ViT and images that are small, by the study's recipes: dense training, off the shelf, fine-tuning."""
    backbone = timm.create_model(SMALL_MODEL["model"], **SMALL_MODEL["backbone_options"])
    save_file(backbone.state_dict(), tmp_path / "deit_tiny_patch16_224.safetensors")
    quick = {**SMALL_MODEL, "image_size": 64, "workers": 0, "epochs": 1, "batch_size": 2, "warmup_steps": 1}
    methods = entries("atc average", "evit")
    how: dict[str, Any] = {"shelf_rates": (0.5,), "tuned_rates": (0.5,), "resamples": 20, "workers": 0}
    scale = DetectorScale(("tiny",), COCO, methods, dense=("dense", quick), tuned=("finetune", quick), **how)
    item = replace(DETECTION, full=scale)
    data = {COCO: write_coco(tmp_path / "coco", n_train=4, n_validation=3)}
    weights = {start("tiny"): tmp_path / "deit_tiny_patch16_224.safetensors"}
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


def test_padding_from_end_to_end(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "_RESAMPLES", 20)
    cells = padding.PADDING.cells(settings)
    assert len(cells) == 11
    few = [cell for cell in cells if cell.about["method"] == "tome"]
    item = replace(padding.PADDING, miniature=2, axes=lambda scale, settings: few)
    results = run(item, settings).results
    assert [r["way"] for r in results] == ["alone", "padded, apart", "padded, merged"]
    assert all(0 <= r["box_AP"] <= 100 for r in results) and results[0]["to_alone"]["box"] == [0.0, 0.0]
    page = (settings.folder("padding") / "tables.md").read_text()
    assert "2 scenes" in page and f"| tome 50% | alone | {results[0]['box_AP']:.1f} |" in page


def test_real_images_from_end_to_end(settings: Settings, tmp_path: Path) -> None:
    backbone = timm.create_model(SMALL_MODEL["model"], **SMALL_MODEL["backbone_options"])
    file = tmp_path / "small.safetensors"
    save_file(backbone.state_dict(), file)
    small = {k: v for k, v in SMALL_MODEL.items() if k != "head_options"}
    choices = {**small, "image_size": 64, "evaluate_every": 1, "warmup_steps": 1}
    scale = replace(NUCLEI, epochs=2, choices=choices, heads=SMALL_MODEL["head_options"])
    item = replace(ITEMS[1], full=scale)
    data = write_coco(tmp_path / "coco", n_train=5)
    full = replace(settings, miniature=False, data={"nuclei": data}, weights={start("tiny"): file})
    results = {(r["part"], r["method"], r["keep_rate"]): r for r in run(item, full).results}
    assert len(results) == 17 and results["training", DENSE, None]["images"] == {"train": 4, "validation": 1}
    assert "pairs" in results["reduced", "tome", 0.25]["cannot"] and len(results["training", DENSE, None]["log"]) == 2
    assert results["reduced", "one token", None]["tokens"] == 1
    page = (full.folder("nuclei") / "tables.md").read_text()
    assert (
        "4 images to learn, 1 to judge by, from small.safetensors" in page
        and "| tome | 25% | cannot | cannot |" in page
    )


def test_settings_on_real_images() -> None:
    overfit, nuclei = (scale.training(Path("deit.safetensors")) for scale in (COCO_OVERFIT, NUCLEI))
    assert (overfit.images, overfit.held_out, overfit.flip, overfit.epochs) == (12, 0, 0, 60) and overfit.evaluate_first
    assert nuclei.images is None and nuclei.held_out == 0.2 and nuclei.epochs == 6
    log = [{"box_AP": 1.0, "mask_AP": 0.5}, {"box_AP": 30.0, "mask_AP": 25.0}]
    assert rises(log) and not rises([log[0], {**log[1], "mask_AP": 0.1}])
    assert all(not item.is_offered(True) and item.is_offered(False) for item in ITEMS)
