"""The items of classification: cells that fit together, and the way of a miniature from data to tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import find_idx, read_idx, write_idx
from agglo.lab.paper.classifiers import ALL, FASHION, PAPER
from agglo.lab.paper.output import write_output
from agglo.lab.paper.registry import item_named, items, overview
from agglo.lab.paper.runner import attempt
from agglo.lab.paper.study import CannotRunError, Settings, Study

BOTH = pytest.mark.parametrize("miniature", [False, True], ids=["full", "miniature"])


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 images to train with and 40 to judge by, of those that come with agglo."""
    folder = tmp_path_factory.mktemp("fashion")
    for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
        values = read_idx(find_idx(embedded.IMAGES, f"t10k-{kind}-ubyte"), dimensions)
        write_idx(folder / f"train-{kind}-ubyte.gz", values[40:104])
        write_idx(folder / f"t10k-{kind}-ubyte.gz", values[:40])
    return folder


@pytest.fixture
def settings(fashion: Path, tmp_path: Path) -> Settings:
    return Settings(miniature=True, data={FASHION: fashion}, output=tmp_path / "results", runs=tmp_path / "runs")


def run(item: Study, settings: Settings, **about: Any) -> list[dict[str, Any]]:
    """The results of those cells that have these values, as a record would hold them."""
    chosen = [c for c in item.cells(settings) if all(c.about.get(name) == value for name, value in about.items())]
    assert chosen, about
    run_cell = item.open(settings)
    return [{**cell.about, **attempt(run_cell, cell), "processor": "p", "date": "2026-11-17"} for cell in chosen]


@BOTH
def test_cells_are_told_apart(miniature: bool) -> None:
    asked = Settings(miniature=miniature)
    for item in items().values():
        cells = item.cells(asked)
        assert len({cell.key for cell in cells}) == len(cells), item.name
        json.dumps([dict(cell.about) for cell in cells])


def test_the_big_table_has_all_its_cells() -> None:
    cells = item_named("fine-tuned").cells(Settings())
    assert len(cells) == 3 * 4 * (4 * 16 + 1)
    assert len(item_named("fine-tuned").cells(Settings(seeds=3))) == 3 * len(cells)


def test_every_method_takes_part() -> None:
    import agglo

    assert {entry.method for entry in ALL} == {info.name for info in agglo.list_methods()}


def test_lists(tmp_path: Path) -> None:
    assert [row[0] for row in overview(items().values(), tmp_path, Settings()).rows] == list(items())
    with pytest.raises(ValueError, match=r"item='fine-tune' .* mean 'fine-tuned'"):
        item_named("fine-tune")


def test_off_the_shelf(settings: Settings) -> None:
    item = item_named("off-the-shelf")
    found = run(item, settings, keep_rate=None)
    found += run(item, settings, method="atc average", keep_rate=0.5)
    found += run(item, settings, method="atc average as released", keep_rate=0.5)
    found += run(item, settings, method="tome", keep_rate=0.25)
    assert [result.get("images") for result in found] == [40, 40, 40, None] and "pairs" in found[3]["cannot"]
    assert found[2]["config"]["sizes"] == "ignored" and found[2]["config"]["proportional"] is False
    folder = write_output(item, found, settings)
    page = (folder / "tables.md").read_text()
    assert f"dense: {found[0]['top1']:.2f}" in page and f"| atc average | {found[1]['top1']:.2f} |" in page
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_fine_tuned(settings: Settings) -> None:
    item = item_named("fine-tuned")
    found = run(item, settings, method="atc average", keep_rate=0.25, seed=1)
    found += run(item, settings, method="tome", keep_rate=0.25, seed=0)
    assert found[0]["counts"][-1] == 3 and 0 <= found[0]["top1"] <= 100 and "pairs" in found[1]["cannot"]
    assert "| tome | cannot |" in (write_output(item, found, settings) / "tables.md").read_text()
    assert not run(item, settings, method="atc average", keep_rate=0.25, seed=1)[0].get("cannot"), "returns at once"


def test_what_follows_is_drawn_from_the_record(settings: Settings) -> None:
    folder = settings.folder("fine-tuned")
    folder.mkdir(parents=True)
    results = [
        {"model": "m", "data": FASHION, "method": method, "keep_rate": rate, "seed": seed, "top1": top1 + seed,
         "images": 100, "processor": "p", "date": "2026-11-17"}
        for rate in (0.25, 0.5)
        for method, top1 in (("kmedoids", 60.0), ("atc single", 61.0), ("atc average", 63.5), ("atc complete", 62.0))
        for seed in (0, 1)
    ]  # fmt: skip
    (folder / "record.json").write_text(json.dumps({"results": results}))
    shown = {
        "rank": "| atc average | 1.00 +- 0.00 | 1.97 +- 1.17 | 1.97 +- 1.17 |",
        "difference": "| atc average | +3.50 (0.00) | +2.51 | +2.51 |",
        "ranking-per-rate": "ranking-per-rate.png",
        "accuracy-curves": "accuracy.png",
    }
    for name, part in shown.items():
        page = (write_output(item_named(name), [], settings) / "tables.md").read_text()
        assert part in page and ".png)" in page and "p, 2026-11-17" in page


def test_the_papers_figures_follow_from_its_table(tmp_path: Path) -> None:
    """Without any data: curves of all models and data sets, and ranks among the paper's own methods."""
    full = Settings(output=tmp_path)
    folder = write_output(item_named("accuracy-curves"), [], full)
    assert [path.name for path in folder.glob("*.png")] == ["as-printed.png"]
    page = (write_output(item_named("ranking-per-rate"), [], full) / "tables.md").read_text()
    assert all(page.count(f"| {entry.name} |") in (3, 4) for entry in PAPER) and "evovit" not in page


def test_mae(settings: Settings) -> None:
    item = item_named("mae")
    found = []
    for method, left in (("atc single", 9), ("atc single as released", 20)):
        found += run(item, settings, training="off the shelf", schedule="linear", method=method)
        assert found[-1]["counts"][-1] == left
    found += run(item, settings, training="fine-tuned", schedule="constant", method="tome", seed=1)
    assert found[-1]["counts"][-1] == 10 and found[-1]["batch_size"] == 32
    page = (write_output(item, found, settings) / "tables.md").read_text()
    assert "agglo_fashion_vit, fine-tuned" in page and "atc single as released" in page
    tuned = [cell for cell in item.cells(settings) if cell.about["training"] == "fine-tuned"]
    assert not any("released" in cell.about["method"] for cell in tuned), "off by default"


def test_curves(settings: Settings, monkeypatch: pytest.MonkeyPatch, fashion: Path) -> None:
    monkeypatch.setattr(embedded, "IMAGES", fashion)
    for family in ("swag", "mae"):
        item = item_named(f"curves-{family}")
        few = replace(item.miniature, subjects=(replace(item.miniature.subjects[0], images=12),))
        item = replace(item, miniature=few)
        t, patches = (18, 441) if family == "swag" else (8, 196)
        found = [*run(item, settings, t=0), *run(item, settings, t=t, schedule="constant", method="atc average")]
        assert len(found) == 2 and found[1]["images"] == 12
        assert found[1]["counts"][0] == patches - t
        folder = write_output(item, found, settings)
        assert [path.name for path in folder.glob("*.png")] == ["curves-constant.png"]
        assert f"| atc average | {found[1]['top1']:.2f} |" in (folder / "tables.md").read_text()


def test_hyper_parameters(settings: Settings) -> None:
    item = item_named("hyper-parameters")
    cells = item.cells(replace(settings, seeds=2))
    found = [{**cell.about, "top1": 80.0 + 2 * cell.about["seed"], "images": 100} for cell in cells]
    page = (write_output(item, found, settings) / "tables.md").read_text()
    assert page.count("| yes |") == 1, "the paper's choice is marked"
    assert page.count("81.00 (1.41)") == 8, "the spread of two seeds"


def test_clusters(settings: Settings) -> None:
    item = item_named("clusters")
    found = run(item, settings, sheet="linkages")
    folder = write_output(item, found, settings)
    assert (folder / "linkages.png").read_bytes().startswith(b"\x89PNG")
    assert "![linkages](linkages.png)" in (folder / "tables.md").read_text()
    full = Settings(data={"imagenet": folder}, weights={"deit_small_patch16_224": folder}, output=settings.output)
    with pytest.raises(CannotRunError, match=r"no image under .* has '00021007' in its name"):
        item.open(full)({"sheet": "imagenet"})
