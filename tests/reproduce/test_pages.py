"""Pages of the documentation hold what the committed records say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from agglo.reproduce.item import key_of
from agglo.reproduce.output import write_output
from agglo.reproduce.pages import replace_between_marks
from agglo.reproduce.record import read_results
from agglo.reproduce.registry import items
from tools import pages
from tools.pages import FULL, MINIATURE, PAGES, ROOT


@pytest.mark.parametrize(("page", "name", "text"), PAGES, ids=[f"{page}, {name}" for page, name, _ in PAGES])
def test_page(page: str, name: str, text: Callable[[], str]) -> None:
    written = (ROOT / page).read_text(encoding="utf-8")
    assert replace_between_marks(written, name, text()) == written, "`make pages` writes it anew"


@pytest.mark.parametrize("settings", [FULL, MINIATURE], ids=["full", "miniature"])
def test_committed_tables_are_those_of_their_records(settings, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for item in items().values():
        folder = settings.folder(item.name)
        if not (folder / "tables.md").exists():
            continue
        here = replace(settings, output=tmp_path)
        for other in items():  # what items are made of
            if (record := settings.folder(other) / "record.json").exists():
                here.folder(other).mkdir(parents=True, exist_ok=True)
                (here.folder(other) / "record.json").write_bytes(record.read_bytes())
        again = write_output(item, read_results(folder), here)
        for name in ("tables.md", "tables.tex"):
            assert (again / name).read_text() == (folder / name).read_text(), f"agglo reproduce {item.name} --redraw"


@pytest.mark.parametrize("settings", [FULL, MINIATURE], ids=["full", "miniature"])
def test_committed_results_are_continued(settings) -> None:  # type: ignore[no-untyped-def]
    """Cells of today find the results that were committed; otherwise a study would be run again, beside the old one."""
    for item in items().values():
        known = {cell.key for seeds in (None, 3) for cell in item.cells(replace(settings, seeds=seeds))}
        orphans = [one["cell"] for one in read_results(settings.folder(item.name)) if key_of(one["cell"]) not in known]
        assert not orphans, f"{item.name} has results of cells that it does not ask for: {orphans[:3]}"


def test_an_unfinished_benchmark_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((ROOT / "results" / "bench" / "diffusion.json").read_text(encoding="utf-8"))
    for row in record["rows"]:
        row["calls"] = row["calls"][:-1]
    monkeypatch.setattr(pages, "_load", lambda name: record)
    with pytest.raises(ValueError, match=r"diffusion\.json is unfinished: make bench-diffusion"):
        pages.denoising_step()
