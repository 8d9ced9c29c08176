"""Runs of items: every cell once, kept at once, whatever stops the run; what cannot be run is a result."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from agglo.reproduce.item import Cell, Settings
from agglo.reproduce.listing import listing
from agglo.reproduce.output import in_order
from agglo.reproduce.places import data_places, weight_places
from agglo.reproduce.record import ItemRecord, read_results
from agglo.reproduce.runner import attempt, run
from tests.reproduce.toy import Toy
from tests.support.killing import die_at_replacement


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(miniature=True, output=tmp_path, seeds=2)


def test_a_stopped_run_goes_on_with_the_next_cell(settings: Settings) -> None:
    item = Toy()
    item.fails_at = "atc, 0.5, 1"
    with pytest.raises(KeyboardInterrupt):
        run(item, settings)
    folder = settings.folder("toy")
    kept = read_results(folder)
    assert [result["seed"] for result in kept] == [0, 1, 0] and folder == settings.output / "miniature" / "toy"
    before, item.fails_at, item.ran = list(item.ran), None, []
    found = run(item, settings)
    assert not set(before) & set(item.ran), "no cell runs twice"
    assert len(found.results) == 9 and read_results(folder)[:3] == kept
    item.ran = []
    run(item, settings)
    assert not item.ran, "one that is done runs nothing"


def _die_while_writing(settings: Settings) -> None:
    die_at_replacement(4)
    run(Toy(), settings)


def test_a_run_that_is_killed_while_it_writes_goes_on(settings: Settings) -> None:
    process = get_context("fork").Process(target=_die_while_writing, args=(settings,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    folder = settings.folder("toy")
    assert len(read_results(folder)) == 3 and len(list(folder.iterdir())) == 2, "what is half written lies beside it"
    item = Toy()
    assert len(run(item, settings).results) == 9 and len(item.ran) == 6
    assert not list(folder.glob("*unfinished"))


def test_what_cannot_be_run_is_a_result(settings: Settings) -> None:
    by_title = {(r["method"], r["keep_rate"]): r for r in run(Toy(), settings).results}
    assert by_title["tome", 0.25]["cannot"] == "tome merges pairs"
    assert by_title["big", 0.5]["cannot"] == "out of memory: 2 TiB were asked for"
    assert "top1" not in by_title["tome", 0.25] and by_title["tome", 0.5]["top1"] == 51.0

    def broken(cell: Cell) -> dict[str, float]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    def full(cell: Cell) -> dict[str, float]:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")

    def refused(cell: Cell) -> dict[str, float]:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    assert str(attempt(refused, Cell({"a": 1}))["cannot"]).startswith("out of memory")
    with pytest.raises(RuntimeError, match="mat1"):
        attempt(broken, Cell({"a": 1}))
    assert str(attempt(full, Cell({"a": 1}))["cannot"]).startswith("out of memory")


def test_tables_show_measured_beside_printed_with_the_error_of_the_difference(settings: Settings) -> None:
    run(Toy(), settings)
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
        run(Toy(), full)
    found = run(Toy(), replace(full, data={"toys": tmp_path}))
    assert len(found.results) == 8 and [cell.about["method"] for cell in found.left_out] == ["big"]
    assert full.folder("toy") == tmp_path / "toy"


def test_listing(settings: Settings, tmp_path: Path) -> None:
    full = replace(settings, miniature=False)
    # 8 cells of 1e15 at 1e13 per second: 800 seconds.
    line = listing([Toy()], full).splitlines()[1].split()
    assert line == ["toy", "table", "of", "toys", "0.2", "0/9", "-toys", "-bear"]
    run(Toy(), replace(full, data={"toys": tmp_path}))
    line = listing([Toy()], replace(full, data={"toys": tmp_path})).splitlines()[1].split()
    assert line[-3:] == ["8/9", "toys", "-bear"]


def test_tables_have_all_seeds_of_the_record_in_the_order_of_cells(settings: Settings) -> None:
    run(Toy(), replace(settings, seeds=3))
    path = settings.folder("toy") / "record.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "results": content["results"][::-1]}))
    assert len(run(Toy(), replace(settings, seeds=1)).results) == 5, "those that were asked for"
    page = (settings.folder("toy") / "tables.md").read_text()
    assert "| atc | 26.00 (1.00) | 51.00 (1.00) |" in page, "the mean of three"
    numbered = [(r["method"], r["keep_rate"]) for r in in_order(Toy(), read_results(path.parent), settings)]
    assert numbered[:4] == [("atc", 0.25), ("atc", 0.25), ("atc", 0.5), ("atc", 0.5)]


def test_records_of_something_else_are_refused(settings: Settings) -> None:
    run(Toy(), settings)
    path = settings.folder("toy") / "record.json"
    with pytest.raises(ValueError, match="of another item: 'toy'"):
        ItemRecord(path, "bear", miniature=True)
    path.write_text(json.dumps({"results": [1]}))
    with pytest.raises(ValueError, match="no record of `agglo reproduce`"):
        run(Toy(), settings)


def test_other_weights_or_images_of_the_same_name_are_refused(tmp_path: Path) -> None:
    """One table is not to mix them; other models, and results of before this was noted, are no matter."""
    record = ItemRecord(tmp_path / "record.json", "toy", miniature=True)
    about = {"model": "vit", "data": "toys", "method": "atc", "keep_rate": 0.5}
    record.add(Cell(about), {"top1": 50.0, "weights": "aaaa", "data_fingerprint": "1111"})
    record.add(Cell({**about, "keep_rate": 0.25}), {"top1": 50.0})
    record.add(Cell({**about, "model": "deit"}), {"weights": "bbbb", "data_fingerprint": "1111"})
    continued = ItemRecord(tmp_path / "record.json", "toy", miniature=True)
    continued.add(Cell({**about, "method": "tome"}), {"weights": "aaaa", "data_fingerprint": "1111"})
    with pytest.raises(ValueError, match=r"other weights of the same name \(aaaa, and bbbb now"):
        continued.add(Cell({**about, "method": "evit"}), {"weights": "bbbb", "data_fingerprint": "1111"})
    with pytest.raises(ValueError, match="other images of the same name"):
        continued.add(Cell({**about, "method": "evit"}), {"weights": "aaaa", "data_fingerprint": "2222"})
    assert len(read_results(tmp_path)) == 4


def test_places(tmp_path: Path) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "bear.pth").touch()
    item = [Toy()]
    assert data_places([str(tmp_path)], item, miniature=False) == {"toys": tmp_path / "toys"}
    assert data_places([str(tmp_path / "toys")], item, miniature=False) == {"toys": tmp_path / "toys"}
    assert data_places([f"toys={tmp_path}"], item, miniature=False) == {"toys": tmp_path}
    bear = {"bear": tmp_path / "bear.pth"}
    for typed in (str(tmp_path), str(tmp_path / "bear.pth"), f"bear={tmp_path / 'bear.pth'}"):
        assert weight_places([typed], item, miniature=False) == bear
    with pytest.raises(ValueError, match="'dolls' is not needed; accepted: toys"):
        data_places([f"dolls={tmp_path}"], item, miniature=False)
    with pytest.raises(ValueError, match="does not exist"):
        weight_places(["nowhere.pth"], item, miniature=False)
    (tmp_path / "cat.pth").touch()
    with pytest.raises(ValueError, match="like none of bear"):
        weight_places([str(tmp_path / "cat.pth")], item, miniature=False)
