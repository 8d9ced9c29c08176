"""What `agglo bench adapter` reports is what ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agglo.lab.cli import main


def test_the_report_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speed.json"
    words = ["--image", "64", "96", "--keep-rate", "0.5", "--method", "tome", "--repeats", "2", "--threads", "1"]
    assert main(["bench", "adapter", *words, "--json", str(path)]) == 0
    assert "| dense |" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["tokens"] == 24
    assert report["machine"]["cpu"] and report["machine"]["date"]
    dense, reduced = report["results"]
    assert (dense["counts"][-1], reduced["counts"][-1]) == (24, 3)
    assert reduced["gflops"] < dense["gflops"]
    for result in (dense, reduced):
        assert len(result["passes"]) == 2
        for one in result["passes"]:
            parts = [one[part] for part in ("convolutions", "interactions", "method", "blocks")]
            assert sum(parts) == pytest.approx(one["all"])
            assert all(part > 0 for part in (parts[0], parts[1], parts[3]))
            assert (one["method"] > 0) == (result is reduced)
