"""A detector's training that is killed with SIGKILL goes on and ends with the weights of one that was not."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest
import torch

from agglo.lab.tasks.detection.training.settings import DetectionSettings
from agglo.lab.tasks.detection.training.trainer import train_detector
from agglo.utils.files import load_state
from tests.support.detection import quick_detection, write_coco
from tests.support.killing import die_at_replacement, require_equal, require_same_files

_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(
    ["agglo.lab.tasks.detection.training.trainer", "tests.support.detection", "accelerate", "timm"]
)

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")


def _train(settings: DetectionSettings, data: Path, output: Path, dies_at: int | None) -> None:
    torch.set_num_threads(1)
    if dies_at is not None:
        die_at_replacement(dies_at)
    train_detector(settings, data, output)


def train(settings: DetectionSettings, data: Path, output: Path, dies_at: int | None = None) -> int | None:
    """Train in another process, which kills itself at a replacement of a file; its exit code."""
    process = _SPAWN.Process(target=_train, args=(settings, data, output, dies_at))
    process.start()
    process.join()
    return process.exitcode


def test_killed_while_files_are_written(tmp_path: Path) -> None:
    # Draws: the order, mirrored images, sampled proposals, drop path, SViT's Gumbel noise.
    settings = quick_detection(method="svit", keep_rate=0.7)
    data = write_coco(tmp_path / "data")
    assert train(settings, data, tmp_path / "whole") == 0
    output = tmp_path / "run"
    # 1 is settings.json, 2 start.json, then three steps' states, then an evaluation's four files, its state, and so on.
    assert train(settings, data, output, 5) == -signal.SIGKILL
    assert train(settings, data, output) == 0
    states = [load_state(folder / "last" / "state.pt") for folder in (output, tmp_path / "whole")]
    require_equal(*states)
    assert states[0] is not None and states[0]["position"]["step"] == 6
    names = ("best/model.safetensors", "last/model.safetensors", "best/result.json", "log.csv", "result.json")
    require_same_files(output, tmp_path / "whole", names)
    assert not list(output.rglob("*.unfinished"))
