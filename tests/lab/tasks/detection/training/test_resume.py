"""A detector's training that is killed with SIGKILL goes on and ends with the weights of one that was not."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest
import torch

from agglo.lab.cli import main
from agglo.lab.tasks.detection.training.settings import DetectionSettings
from agglo.lab.tasks.detection.training.trainer import train_detector
from agglo.utils.files import load_state
from tests.support.detection import quick_detection, write_coco
from tests.support.killing import die_at_replacement, require_equal, require_same_files
from tests.support.processes import FORKSERVER

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")


def _train(settings: DetectionSettings, data: Path, output: Path, dies_at: int | None) -> None:
    torch.set_num_threads(1)
    if dies_at is not None:
        die_at_replacement(dies_at)
    train_detector(settings, data, output)


def train(settings: DetectionSettings, data: Path, output: Path, dies_at: int | None = None) -> int | None:
    """Train in another process, which kills itself at a replacement of a file; its exit code."""
    process = FORKSERVER.Process(target=_train, args=(settings, data, output, dies_at))
    process.start()
    process.join()
    return process.exitcode


def test_killed_while_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Draws: the order, mirrored images, sampled proposals, drop path, SViT's Gumbel noise.
    settings = quick_detection(method="svit", keep_rate=0.7)
    data, whole, run = write_coco(tmp_path / "data"), tmp_path / "whole", tmp_path / "run"
    assert train(settings, data, whole) == 0
    # 1 is settings.json, 2 start.json, then three steps' states, then an evaluation's four files, its state, and so on.
    assert train(settings, data, run, 5) == -signal.SIGKILL
    assert train(settings, data, run) == 0
    states = [load_state(folder / "last" / "state.pt") for folder in (run, whole)]
    require_equal(*states)
    assert states[0] is not None and states[0]["position"]["step"] == 6
    names = ("best/model.safetensors", "last/model.safetensors", "best/result.json", "log.csv", "result.json")
    require_same_files(run, whole, names)
    assert not list(run.rglob("*.unfinished"))

    # The log has the losses in parts and their sum, and what a method learned is evaluated with it.
    for row in csv.DictReader((whole / "log.csv").open()):
        parts = ("rpn_cls", "rpn_bbox", "cls", "bbox", "mask", "method")
        values = [float(row[f"train_loss_{name}"]) for name in parts]
        assert min(values) > 0 and sum(values) == pytest.approx(float(row["train_loss"]), rel=1e-5)
    command = ["detect", "evaluate", str(run), "--data", str(data), "--images", "1", "--device", "cpu"]
    assert main([*command, "--method", "svit", "--keep-rate", "0.5", "--turns", "0"]) == 0
    assert "svit" in capsys.readouterr().out
    assert main([*command, "--method", "dynamicvit", "--keep-rate", "0.5"]) == 2
    assert "holds weights of another method" in capsys.readouterr().err
