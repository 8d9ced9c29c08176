"""Detection in miniature: its cells, what it keeps and goes on from, its gate, and what its page says of a record."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agglo
from agglo.embedded.classifier import IMAGES
from agglo.experiments.files import save_weights
from benchmarks import mini_detection, mini_detection_report, real_detection
from benchmarks.mini_detection_cells import dense_settings, is_kept, measure, refusal, samples, tuned_settings
from benchmarks.mini_detection_plan import (
    COLLAPSED,
    DENSE,
    ENTRIES,
    GATE,
    SHELF,
    SHELF_ENTRIES,
    TUNED,
    TUNED_ENTRIES,
    Cell,
    Plan,
    Study,
)
from benchmarks.mini_detection_record import BESIDES, CLAIMS, Record, compared, complete_seeds, gate

pytest.importorskip("faster_coco_eval")
MACHINE = {"cpu": "a processor", "gpu": None, "date": "2026-11-16T00:00:00"}
PLAN = Plan(seeds=2, shelf_rates=(0.5, 0.25), tuned_rates=(0.5, 0.25))


def study_in(folder: Path, **changes: Any) -> Study:
    return Study(IMAGES, folder / "runs", **{"validation": 3, "resamples": 40, **changes})


def record_in(folder: Path, study: Study, plan: Plan = PLAN) -> Record:
    return Record(folder / "record.json", study, plan, MACHINE)


def pretend(study: Study, record: Record, cell: Cell, box: float, mask: float | None = None) -> None:
    """A cell as if it had been measured: its result, its samples around it, and files in place of match tables."""
    mask = box - 2 if mask is None else mask
    folder = cell.folder(study)
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).normal(0, 0.5, study.resamples)  # the same scenes in every cell
    own = np.random.default_rng(len(cell.title)).normal(0, 0.1, study.resamples)
    np.savez(folder / "samples.npz", box=box + noise + own, mask=mask + noise + own)
    for name in ("box", "mask"):
        (folder / f"{name}.npz").touch()
    note(record, cell, {"box_AP": box, "mask_AP": mask, "tokens": 9, "gflops": 0.1})


def note(record: Record, cell: Cell, found: dict[str, Any]) -> None:
    """As `Record.add`, without writing the file for each of a hundred cells."""
    record.content["results"].append({**cell.key, **found, "processor": "a processor"})


def filled(folder: Path, seeds: int = 2, collapsed: float = 10.0) -> tuple[Study, Record]:
    """A whole study: the later an entry is named, the worse it is, and tome cannot do everything."""
    study = study_in(folder)
    record = record_in(folder, study)
    for seed in range(seeds):
        for cell in PLAN.cells(seed):
            place = (
                0 if cell.name == DENSE.name else 1 + [entry.name for entry in (*ENTRIES, COLLAPSED)].index(cell.name)
            )
            if cell.name == "tome" and cell.rate == 0.25:
                note(record, cell, {"cannot": "at most half"})
            else:
                value = 40.0 + seed - place - (3 if cell.rate == 0.25 else 0) + (place / 2 if cell.part == TUNED else 0)
                pretend(study, record, cell, collapsed if cell.name == COLLAPSED.name else value)
        record.add_gate(gate(study, PLAN, record, seed))
    record.compare(compared(study, record))
    return study, record


def test_the_methods_that_take_part() -> None:
    wanted = {"atc", "tome", "kmedoids", "dpc_knn", "evit", "topk", "ats", "evovit", "random", "pool"}
    assert {entry.method for entry in SHELF_ENTRIES} == wanted
    assert {entry.method for entry in TUNED_ENTRIES} == wanted | {"svit", "dynamicvit", "dynamicvit_prsv"}
    learning = {info.name for info in agglo.list_methods() if info.learns}
    assert {entry.method for entry in ENTRIES if entry.learns} == learning & {entry.method for entry in ENTRIES}
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)


def test_cells_have_places_of_their_own_and_claims_are_of_cells(tmp_path: Path) -> None:
    plan, study = Plan(), study_in(tmp_path)
    cells = plan.cells()
    assert len({cell.folder(study) for cell in cells}) == len(cells) == 2 * (2 + 4 * 12 + 1 + 2 * 15)
    assert [cell.part for cell in cells[:2]] == [SHELF, GATE] and cells[4].rate == 0.5
    assert [{cell.rate for cell in stage} for stage in plan.stages()] == [
        {0.5},
        {0.25},
        {0.7},
        {0.9},
        {None},
        {0.5},
        {0.25},
    ]
    assert all({cell.seed for cell in stage} == {0, 1} for stage in plan.stages())
    known = {(cell.part, cell.name, cell.rate) for cell in cells}
    assert {(term.part, term.name, term.rate) for claim in (*CLAIMS, *BESIDES) for term in claim.terms} <= known
    assert pickle.loads(pickle.dumps(cells)) == cells  # they are measured in other processes
    words = [claim.words for claim in (*CLAIMS, *BESIDES)]
    assert len(set(words)) == len(words)


def test_settings_of_every_training(tmp_path: Path) -> None:
    study = study_in(tmp_path, epochs=4)
    dense = dense_settings(study, 1)
    assert dense.class_token and dense.method == "none" and dense.seed == 1 and max(dense.lr_drops) < 4
    for cell in (cell for cell in Plan().cells() if (cell.part, cell.seed) == (TUNED, 1)):
        tuned = tuned_settings(study, cell)
        assert (tuned.method, tuned.keep_rate) == (cell.entry.method, cell.rate) and tuned.class_token
        assert tuned.checkpoint == str(study.dense_weights(1)) and not tuned.from_scratch and tuned.seed == 1
        assert (tuned.head_options, tuned.adapter_options) == (dense.head_options, dense.adapter_options)
        assert tuned.lr < dense.lr and tuned.epochs == study.tuning_epochs


@pytest.fixture
def untrained(tmp_path: Path) -> Study:
    """A study whose dense detector has not learned anything."""
    study = study_in(tmp_path, validation=2)
    torch.manual_seed(0)
    from agglo.experiments.fashion_mnist import CLASSES

    spec = dense_settings(study, 0).spec(list(CLASSES))
    model = spec.build(start=True)
    save_weights(study.dense_weights(0), model.state_dict(), spec.about())
    return study


def test_a_cell_is_measured_and_kept(untrained: Study) -> None:
    found = {}
    for cell in (
        Cell(SHELF, 0, DENSE.name),
        Cell(GATE, 0, COLLAPSED.name),
        Cell(SHELF, 0, "atc average", 0.5),
        Cell(SHELF, 0, "evit", 0.5),
    ):
        assert not is_kept(untrained, cell)
        result = measure(untrained, cell)
        assert is_kept(untrained, cell) and all(0 <= result[f"{kind}_AP"] <= 100 for kind in ("box", "mask"))
        assert {name: len(values) for name, values in samples(untrained, cell).items()} == {"box": 40, "mask": 40}
        found[cell.name] = result
    assert [found[name]["tokens"] for name in ("dense", "one token", "atc average")] == [196, 1, 24]
    assert found["one token"]["gflops"] < found["atc average"]["gflops"] < found["dense"]["gflops"]
    record = record_in(untrained.runs, untrained)
    record.add(Cell(SHELF, 0, DENSE.name), found["dense"])
    assert record_in(untrained.runs, untrained).result(Cell(SHELF, 0, DENSE.name))["processor"] == "a processor"
    cannot = measure(untrained, Cell(TUNED, 0, "tome", 0.25))
    assert "cannot" in cannot and not is_kept(untrained, Cell(TUNED, 0, "tome", 0.25))


def test_only_tome_refuses(untrained: Study) -> None:
    plan = Plan(seeds=1, tuned_rates=(0.25, 0.5, 0.7, 0.9))
    refused = [cell for cell in plan.cells() if refusal(untrained.dense_weights(0), cell) is not None]
    assert {(cell.part, cell.name, cell.rate) for cell in refused} == {
        (SHELF, "tome", 0.25),
        (TUNED, "tome", 0.25),
    }


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    study, record = filled(tmp_path)
    cells = PLAN.cells(0)
    assert mini_detection.missing(study, record, cells) == []
    again = record_in(tmp_path, study)
    assert mini_detection.missing(study, again, cells) == []
    more = Plan(seeds=3, shelf_rates=(0.5, 0.25, 0.9), tuned_rates=PLAN.tuned_rates)
    assert {cell.rate for cell in mini_detection.missing(study, again, more.cells(0))} == {0.9}
    assert len(mini_detection.missing(study, again, more.cells(2))) == len(more.cells(2))
    (cells[3].folder(study) / "mask.npz").unlink()
    assert mini_detection.missing(study, again, cells) == [cells[3]]
    mini_detection.forget(study, PLAN, again, ["evit"])
    gone = mini_detection.missing(study, again, cells)
    assert {cell.name for cell in gone} == {"evit", cells[3].entry.name} and len(gone) == 5


def test_another_study_is_refused(tmp_path: Path) -> None:
    _, record = filled(tmp_path)
    with pytest.raises(ValueError, match="validation=3 there, 4 now"):
        record_in(tmp_path, study_in(tmp_path, validation=4))
    record_in(tmp_path, study_in(tmp_path, resamples=80))  # these decide nothing about AP
    record.add_dense(0, "abc", [{"epoch": 1.0, "box_AP": 20.0, "mask_AP": 19.0}])
    record.add_dense(0, "abc", [])
    with pytest.raises(ValueError, match="another dense detector of seed 0"):
        record.add_dense(0, "def", [])


@pytest.mark.parametrize(("box", "mask", "passed"), [(26.0, 25.0, True), (27.5, 20.0, False), (20.0, 26.0, False)])
def test_the_gate_wants_a_third_of_both(tmp_path: Path, box: float, mask: float, passed: bool) -> None:
    study = study_in(tmp_path)
    record = record_in(tmp_path, study)
    dense, collapsed = PLAN.gate(0)
    pretend(study, record, dense, 40.0, 38.0)
    pretend(study, record, collapsed, box, mask)
    found = gate(study, PLAN, record, 0)
    assert found["passed"] is passed
    assert found["box"]["lost"] == pytest.approx(1 - box / 40) and found["mask"]["lost"] == pytest.approx(1 - mask / 38)
    assert found["box"]["low"] < found["box"]["lost"] < found["box"]["high"]


def test_a_dense_detector_that_finds_nothing_does_not_pass(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    record = record_in(tmp_path, study)
    for cell in PLAN.gate(0):
        pretend(study, record, cell, 0.0, 0.0)
        np.savez(cell.folder(study) / "samples.npz", box=np.zeros(study.resamples), mask=np.zeros(study.resamples))
    found = gate(study, PLAN, record, 0)
    assert not found["passed"] and found["box"]["low"] == found["box"]["high"] == found["box"]["lost"] == 0


def test_the_page_of_a_whole_study(tmp_path: Path) -> None:
    _, record = filled(tmp_path)
    text = mini_detection_report.text(record.content)
    assert text == mini_detection_report.text(json.loads((tmp_path / "record.json").read_text()))
    assert "| keep rate | 25% | 50% | rank 25% | rank 50% |" in text
    # Off the shelf seed 0 gives 39 and seed 1 gives 40 at 50 %, three points less at 25 %.
    assert "| atc average | 36.5 ± 0.7 | 39.5 ± 0.7 | 1 | 1 |" in text
    assert "| tome | cannot | 36.5 ± 0.7 |  | 4 |" in text
    assert "Box AP; dense 40.5 ± 0.7" in text and "passed" in text and "Not ranked" not in text
    agreeing = next(line for line in text.splitlines() if "off the shelf at 50%: atc average ahead of tome" in line)
    assert "+3.0 [" in agreeing and "+3.0, +3.0" in agreeing and agreeing.endswith("| agrees |")
    against = next(line for line in text.splitlines() if "off the shelf at 50%: tome ahead of atc single" in line)
    assert against.endswith("| the other way round |")
    assert "atc average at 25%: fine-tuned it loses less against dense than off the shelf" in text


def test_without_the_gate_nothing_is_ranked(tmp_path: Path) -> None:
    _, record = filled(tmp_path, collapsed=39.0)
    text = mini_detection_report.text(record.content)
    assert "**Not ranked**" in text and "not passed" in text
    assert not any(entry.name in text for entry in ENTRIES) and "rank 50%" not in text
    mini_detection_report.write(tmp_path)
    assert not (tmp_path / "ap.png").exists()


def test_unfinished_seeds_are_left_out_and_named(tmp_path: Path) -> None:
    study, record = filled(tmp_path)
    record.remove(Cell(TUNED, 1, ENTRIES[0].name, 0.5))
    record.compare(compared(study, record))
    assert complete_seeds(record.content, SHELF) == [0, 1] and complete_seeds(record.content, TUNED) == [0]
    text = mini_detection_report.text(record.content)
    assert "Not finished, and left out: seed 1." in text and "One seed" in text
    record.remove(Cell(TUNED, 0, ENTRIES[0].name, 0.5))
    record.compare(compared(study, record))
    assert "Unfinished: no seed has all of its cells yet." in mini_detection_report.text(record.content)
    assert "| unfinished |" in mini_detection_report.text(record.content)


def test_the_picture(tmp_path: Path) -> None:
    filled(tmp_path)
    mini_detection_report.write(tmp_path)
    assert (tmp_path / "ap.png").read_bytes().startswith(b"\x89PNG")


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
    found = {kind: {"low": low, "high": high} for kind, (low, high) in {"box": box, "mask": mask}.items()}
    assert mini_detection_report.verdict(found) == said


def test_a_page_gets_a_place_once() -> None:
    record = real({"box_AP": 1.0, "mask_AP": 0.5}, {"box_AP": 30.0, "mask_AP": 25.0})
    page = real_detection.with_table("# A page\n", record)
    assert "| 5 | 30.0 | 25.0 |" in page and real_detection.has_place(page, "overfit")
    assert real_detection.with_table(page, record) == page
    assert real_detection.rises(record)
    assert not real_detection.rises(real({"box_AP": 3.0, "mask_AP": 0.5}, {"box_AP": 2.0, "mask_AP": 25.0}))


def real(first: dict[str, float], last: dict[str, float]) -> dict[str, Any]:
    log = [{"epoch": 0.0, **first}, {"epoch": 5.0, **last}]
    about = {"part": "overfit", "machine": MACHINE, "epochs": 5, "start": "random weights"}
    return {**about, "images": {"train": 12, "validation": 12}, "log": log, "reduced": []}


def test_settings_on_real_images() -> None:
    overfit, nuclei = (real_detection.settings_of(part, None, 10) for part in ("overfit", "nuclei"))
    assert (overfit.images, overfit.held_out, overfit.flip) == (12, 0, 0) and overfit.evaluate_first
    assert nuclei.images is None and nuclei.held_out == 0.2
    names = {None if variant is None else variant.name for variant in real_detection.reductions()}
    assert {None, "one token", "atc average", "tome", "pool", "random"} <= names
