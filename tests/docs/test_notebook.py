"""The notebook runs from top to bottom in a real kernel, and the outputs stored in it are whole."""

from __future__ import annotations

from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install 'agglo[dev]' brings what runs notebooks")
pytest.importorskip("nbclient", reason="pip install 'agglo[dev]' brings what runs notebooks")
pytest.importorskip("ipykernel", reason="pip install 'agglo[dev]' brings what runs notebooks")

from tools.site.notebook import NOTEBOOK, executed  # noqa: E402


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_runs() -> None:
    done = executed(NOTEBOOK)
    assert [cell.execution_count for cell in code(done)] == list(range(1, len(code(done)) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in code(done) for output in cell.outputs) >= 5


def test_what_is_stored_is_whole() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert all(cell.execution_count for cell in code(stored)), "`make notebook` stores the outputs"
    outputs = [output for cell in code(stored) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
