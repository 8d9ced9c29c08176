"""agglo reproduce: the list, an item, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from agglo.lab.cli import main


def test_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["reproduce", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "fine-tuned" in out and "-imagenet" in out and "0/780" in out and "GPU hours" in out
    assert "agglo bench clustering" in out and "not yet" in out
    (tmp_path / "imagenet").mkdir()
    assert main(["reproduce", "--data", str(tmp_path), "--output", str(tmp_path)]) == 0
    assert "-imagenet" not in capsys.readouterr().out


def test_an_item_that_follows_from_printed_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["reproduce", "rank", "--output", str(tmp_path)]) == 0
    assert "| atc average | 1.97 +- 1.17 | 1.97 +- 1.17 |" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "rank").iterdir()} == {"tables.md", "tables.tex", "ranks.png"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "'nothing'"),
        (["clustering"], "agglo bench clustering"),
        (["off-the-shelf"], "imagenet"),
        (["off-the-shelf", "--data", "nowhere"], "'nowhere'"),
        (["off-the-shelf", "--data", "birds=."], "'birds'"),
        (["off-the-shelf", "--weights", "bird=."], "'bird'"),
        (["padding"], "item='padding'"),
        (["nuclei", "--miniature"], "item='nuclei'"),
        (["rank", "--seeds", "0"], "'0'"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    try:
        code = main(["reproduce", *arguments, "--output", str(tmp_path)])
    except SystemExit as stopped:
        code = int(str(stopped.code))
    assert code == 2 and words in capsys.readouterr().err
