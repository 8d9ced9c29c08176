"""The examples run, and say what is true."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_there_is_no_example_without_a_test() -> None:
    assert [path.name for path in EXAMPLES.glob("*.py")] == ["picture.py"]


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "picture.py"), run_name="__main__")
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith(("single", "average", "complete"))]
    assert len(rows) == 3 and all(row[-1] == "True" for row in rows)  # the same groups as scikit-learn
    with Image.open(tmp_path / "example-output" / "groups.png") as sheet:
        assert sheet.width > 4 * 640 and sheet.height > 3 * 416
