"""Runs examples/tour.ipynb from top to bottom and stores the outputs in it: make notebook"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def executed(path: Path, seconds: int = 600) -> Any:
    """Return the notebook with new outputs, run in a kernel of this Python and in a folder of its own.

    seconds: that the kernel may take to start, and each cell to end.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        how = {"timeout": seconds, "startup_timeout": seconds, "kernel_name": "python3"}
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **how).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the run, which would change with every one
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
