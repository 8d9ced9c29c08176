"""`agglo heal`: a folder of images in, weights for the plain model out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import agglo
from agglo.lab.cli import main
from agglo.models.checkpoints import Checkpoint
from tests.support.fashion import agglo_test_vit, write_fashion

pytest.importorskip("matplotlib")


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    torch.manual_seed(0)
    model = agglo_test_vit()
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    data = write_fashion(tmp_path / "data")
    paths = ["--checkpoint", str(tmp_path / "plain.safetensors"), "--data", str(data)]
    how = ["-o", str(tmp_path / "o.safetensors"), "--batch-size", "8", "--device", "cpu"]
    return ["heal", "agglo_test_vit", *paths, *how]


def test_it_writes_weights_for_the_plain_model(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--method", "pool", "--keep-rate", "0.5", "--steps", "6", "--lr", "1e-3"]) == 0
    said = capsys.readouterr()
    assert "-> " in said.out and "points of accuracy lost" in said.out and "healing 6/6" in said.err
    assert {path.name for path in tmp_path.glob("o.*")} == {"o.safetensors", "o.png", "o.txt"}
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("plain", "o"))
    agglo_test_vit().load_state_dict(after, strict=True)
    assert {name for name in before if not torch.equal(before[name], after[name])} <= {n for n in before if "norm" in n}
    expected = agglo.ReductionConfig("pool", keep_rate=0.5)
    assert Checkpoint.read(tmp_path / "o.safetensors").healed_for == expected
    # What it was healed for is known where it is used.
    evaluate = ["evaluate", "agglo_test_vit", "--checkpoint", str(tmp_path / "o.safetensors")]
    evaluate += ["--data", str(tmp_path / "data"), "--no-dense", "--device", "cpu"]
    for rate, warns in (("0.5", False), ("0.6", True)):
        assert main([*evaluate, "--method", "pool", "--keep-rate", rate]) == 0
        assert ("were healed for" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keep-rate", "0.5", "0.7"], "one reduction"),
        ([], "one reduction"),
        (["--keep-rate", "0.5", "-o", "weights.pth"], ".safetensors"),
        (["--keep-rate", "0.5", "--split", "test"], "--split"),
        (["--keep-rate", "0.5", "--images", "2"], "too few"),
    ],
)
def test_what_is_refused(
    command: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        code = main([*command, *more])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    assert code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.glob("o.*"))
