"""The README's table says what the measurements say."""

from __future__ import annotations

from typing import Any

import pytest

from agglo.reproduce.pages import replace_between_marks
from tools.readme_figures import MODEL, numbers


def accuracy() -> list[dict[str, Any]]:
    values = {("dense", None): 72.5, ("tome", 0.5): 64.65, ("atc average", 0.5): 69.5, ("atc average", 0.25): 47.55}
    where = {"model": MODEL, "data": "imagenet", "images": 2000}
    results: list[dict[str, Any]] = [
        {**where, "method": n, "keep_rate": r, "top1": value} for (n, r), value in values.items()
    ]
    results.append({**where, "method": "tome", "keep_rate": 0.25, "cannot": "it merges pairs"})
    results.append({**where, "model": "another", "method": "dense", "keep_rate": None, "top1": 1.0})
    return results


def speed(**changes: Any) -> dict[str, Any]:
    values = {
        ("dense", None): [10.0, 20.0, 10.0],
        ("free", 1.0): [20.0, 40.0, 10.0],
        ("tome", 0.5): [40.0, 80.0, 10.0],
        ("atc average", 0.5): [30.0, 60.0, 40.0],
        ("atc average", 0.25): [50.0, 100.0, 90.0],
    }
    results = [{"name": n, "keep_rate": r, "images_per_second": v} for (n, r), v in values.items()]
    machine = {"cpu": "a processor", "gpu": None, "threads": 2, "date": "2026-11-16T00:34:40+00:00"}
    return {"machine": machine, "settings": {"batch_size": 64}, "results": results, **changes}


def test_the_table() -> None:
    lines = numbers(accuracy(), speed()).splitlines()
    assert lines[2:7] == [
        "| dense | 72.5 | 1.00x | 2.00x |",
        "| ToMe, keep rate 0.5 | 64.7 | 2.00x | 4.00x |",
        "| ATC, keep rate 0.5 | 69.5 | 1.50x | 3.00x |",
        "| ToMe, keep rate 0.25 | cannot |  |  |",
        "| ATC, keep rate 0.25 | 47.5 | 2.50x | 5.00x |",
    ]
    assert "2000 ImageNet images" in lines[-1] and "a processor, 2 threads, 2026-11-16" in lines[-1]
    with pytest.raises(ValueError, match="keep rate 1"):
        numbers(accuracy(), speed(results=[r for r in speed()["results"] if r["name"] != "free"]))


def test_numbers_go_between_the_marks() -> None:
    begin, end = "<!-- numbers: make it -->", "<!-- end of numbers -->"
    page = f"a\n{begin}\nold\n{end}\nb"
    assert replace_between_marks(page, "numbers", "new") == f"a\n{begin}\nnew\n{end}\nb"
    with pytest.raises(ValueError, match=r"no place for 'numbers'"):
        replace_between_marks("a", "numbers", "new")
