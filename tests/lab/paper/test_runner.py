"""Runs of items: every cell once, kept at once, whatever stops the run; what cannot be run is a result."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from agglo.lab.paper.output import in_order, open_journal, read_results
from agglo.lab.paper.paths import find
from agglo.lab.paper.registry import overview
from agglo.lab.paper.runner import attempt, run
from agglo.lab.paper.study import Settings, StudyCell
from tests.lab.paper.toy import Ran, toy
from tests.support.killing import die_at_replacement
from tests.support.processes import torchrun


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(miniature=True, output=tmp_path, seeds=2)


def test_a_stopped_run_goes_on_with_the_next_cell(settings: Settings) -> None:
    stopped, rest, nothing = Ran(fails_at=("atc", 0.5, 1)), Ran(), Ran()
    with pytest.raises(KeyboardInterrupt):
        run(stopped.study(), settings)
    folder = settings.folder("toy")
    kept = read_results(folder)
    assert [result["seed"] for result in kept] == [0, 1, 0] and folder == settings.output / "miniature" / "toy"
    found = run(rest.study(), settings)
    assert rest.cells and not set(stopped.cells) & set(rest.cells), "no cell runs twice"
    assert len(found.results) == 9 and read_results(folder)[:3] == kept
    run(nothing.study(), settings)
    assert not nothing.cells, "one that is done runs nothing"


def _die_while_writing(settings: Settings) -> None:
    die_at_replacement(4)
    run(toy(), settings)


def test_a_run_that_is_killed_while_it_writes_goes_on(settings: Settings) -> None:
    process = get_context("fork").Process(target=_die_while_writing, args=(settings,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    folder = settings.folder("toy")
    assert len(read_results(folder)) == 3 and len(list(folder.iterdir())) == 2, "what is half written lies beside it"
    ran = Ran()
    assert len(run(ran.study(), settings).results) == 9 and len(ran.cells) == 6
    assert not list(folder.glob("*unfinished"))


def test_what_cannot_be_run_is_a_result(settings: Settings) -> None:
    by_title = {(r["method"], r["keep_rate"]): r for r in run(toy(), settings).results}
    assert by_title["tome", 0.25]["cannot"] == "tome merges pairs"
    assert by_title["big", 0.5]["cannot"] == "out of memory: 2 TiB were asked for"
    assert "top1" not in by_title["tome", 0.25] and by_title["tome", 0.5]["top1"] == 51.0


def test_memory_that_runs_out_is_a_result() -> None:
    def run_cell(about: Any) -> dict[str, Any]:
        raise RuntimeError(about["message"])

    for message in ("DefaultCPUAllocator: can't allocate memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"):
        assert str(attempt(run_cell, StudyCell({"message": message}))["cannot"]).startswith("out of memory")
    with pytest.raises(RuntimeError, match="mat1"):
        attempt(run_cell, StudyCell({"message": "mat1 and mat2 shapes cannot be multiplied"}))


def test_several_processes_run_every_cell_together(tmp_path: Path) -> None:
    """As `accelerate launch` and `torchrun` start them."""
    done = torchrun("-m", "tests.lab.paper.toy", str(tmp_path))
    assert len(read_results(tmp_path / "miniature" / "toy")) == 5
    assert done.stderr.count("toy 5/5") == 1, "one process reports"


def test_tables_show_measured_beside_printed_with_the_error_of_the_difference(settings: Settings) -> None:
    run(toy(), settings)
    folder = settings.folder("toy")
    page = (folder / "tables.md").read_text()
    # Two seeds, 50 and 51: deviation 0.71, its error over two seeds 0.5; of 100 images 4.98; of 50 000 printed 0.22.
    assert "| atc | 25.50 (0.71) | 50.50 (0.71) | 55.50 | -5.00 +- 5.00 |" in page
    assert "| tome | cannot | 50.50 (0.71) |  |  |" in page
    assert "`agglo reproduce toy --miniature`" in page and "Less than nothing." in page and "![toy](toy.png)" in page
    tex = (folder / "tables.tex").read_text()
    assert r"atc & 25.50 (0.71) & 50.50 (0.71) & 55.50 & -5.00 +- 5.00 \\" in tex and r"50\% difference" in tex


def test_cells_whose_needs_are_absent_are_left_out(settings: Settings, tmp_path: Path) -> None:
    full = replace(settings, miniature=False)
    with pytest.raises(ValueError, match=r"toys \(a box of toys\)"):
        run(toy(), full)
    found = run(toy(), replace(full, data={"toys": tmp_path}))
    assert len(found.results) == 8 and [cell.about["method"] for cell in found.left_out] == ["big"]
    assert full.folder("toy") == tmp_path / "toy"


def test_overview(settings: Settings, tmp_path: Path) -> None:
    full = replace(settings, miniature=False)
    assert overview([toy()], tmp_path, full).rows == [["toy", "table of toys", "0/5", "0.2", "0/5", "-toys, -bear"]]
    run(toy(), replace(full, data={"toys": tmp_path}))
    [row] = overview([toy()], tmp_path, replace(full, data={"toys": tmp_path})).rows
    assert row[2:] == ["4/5", "0.2", "0/5", "toys, -bear"]


def test_tables_have_all_seeds_of_the_record_in_the_order_of_cells(settings: Settings) -> None:
    run(toy(), replace(settings, seeds=3))
    path = settings.folder("toy") / "record.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "results": content["results"][::-1]}))
    assert len(run(toy(), replace(settings, seeds=1)).results) == 5, "those that were asked for"
    page = (settings.folder("toy") / "tables.md").read_text()
    assert "| atc | 26.00 (1.00) | 51.00 (1.00) |" in page, "the mean of three"
    numbered = [(r["method"], r["keep_rate"]) for r in in_order(toy(), read_results(path.parent), settings)]
    assert numbered[:4] == [("atc", 0.25), ("atc", 0.25), ("atc", 0.5), ("atc", 0.5)]


def test_records_of_something_else_are_refused(settings: Settings) -> None:
    run(toy(), settings)
    path = settings.folder("toy") / "record.json"
    path.parent.rename(settings.folder("bear"))
    with pytest.raises(ValueError, match="item: 'toy' there, 'bear' now"):
        run(Ran().study("bear"), settings)


def test_other_weights_or_images_of_the_same_name_are_refused(settings: Settings) -> None:
    """One table is not to mix them; other models are no matter."""
    settings.folder("toy").mkdir(parents=True)
    journal = open_journal(toy(), settings)
    about = {"model": "vit", "data": "toys", "method": "atc", "keep_rate": 0.5}
    journal.add(about, {"top1": 50.0, "weights": "aaaa", "data_fingerprint": "1111"})
    journal.add({**about, "model": "deit"}, {"weights": "bbbb", "data_fingerprint": "1111"})
    continued = open_journal(toy(), settings)
    for found in ({"weights": "bbbb"}, {"data_fingerprint": "2222"}):
        with pytest.raises(ValueError, match="vit, toys with other"):
            continued.add({**about, "method": "evit"}, found)
    assert len(read_results(settings.folder("toy"))) == 2


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "bear.pth").touch()
    item = [toy()]
    assert find("data", [str(tmp_path)], item, False) == {"toys": tmp_path / "toys"}
    assert find("data", [str(tmp_path / "toys")], item, False) == {"toys": tmp_path / "toys"}
    assert find("data", [f"toys={tmp_path}"], item, False) == {"toys": tmp_path}
    for typed in (str(tmp_path), str(tmp_path / "bear.pth"), f"bear={tmp_path / 'bear.pth'}"):
        assert find("weights", [typed], item, False)["bear"] == tmp_path / "bear.pth"
    with pytest.raises(ValueError, match="'dolls' is not needed; accepted: toys"):
        find("data", [f"dolls={tmp_path}"], item, False)
    with pytest.raises(ValueError, match="does not exist"):
        find("weights", ["nowhere.pth"], item, False)
