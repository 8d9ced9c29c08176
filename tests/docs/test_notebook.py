"""The notebook runs from top to bottom, on fewer images than it shows, and the outputs stored in it are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT

nbformat = pytest.importorskip("nbformat", reason="pip install 'agglo[dev]' brings what runs notebooks")
matplotlib = pytest.importorskip("matplotlib")

FEWER = {"count=500": "count=16", "range(4)": "range(2)", "[:64]": "[:4]", "[:200]": "[:8]", "steps=20": "steps=2"}


def code() -> list[Any]:
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.filterwarnings("ignore")
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    source = "\n".join(cell.source for cell in code())
    for shown, fewer in FEWER.items():
        assert shown in source
        source = source.replace(shown, fewer)
    exec(compile(source, "tour.ipynb", "exec"), {})
    matplotlib.pyplot.close("all")


def test_what_is_stored_is_whole() -> None:
    assert all(cell.execution_count for cell in code()), "`make notebook` stores the outputs"
    outputs = [output for cell in code() for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5
