"""A run that is killed with SIGKILL, at any moment, resumes and ends with the weights of one that was not."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agglo.lab.tasks.classification.training.settings import TrainingSettings
from agglo.lab.tasks.classification.training.trainer import Objective, finetune
from agglo.utils import files as checkpoints
from tests.support.fashion import quick, write_fashion
from tests.support.killing import die_after_state, die_at_replacement, require_equal, require_same_files

_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(
    ["agglo.lab.tasks.classification.training.trainer", "tests.support.fashion", "accelerate", "timm"]
)

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")


def _train(
    settings: TrainingSettings, data: Path, output: Path, prepare: Callable[[Any], None] | None, argument: Any
) -> None:
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(argument)
    finetune(settings, data, output)


def start(
    settings: TrainingSettings,
    data: Path,
    output: Path,
    prepare: Callable[[Any], None] | None = None,
    argument: Any = None,
) -> Any:
    """Train in another process; `prepare(argument)` runs in it first."""
    process = _SPAWN.Process(target=_train, args=(settings, data, output, prepare, argument))
    process.start()
    return process


def train(settings: TrainingSettings, data: Path, output: Path) -> dict[str, Any]:
    """Train in another process to the end; the last checkpoint."""
    process = start(settings, data, output)
    process.join()
    assert process.exitcode == 0
    state = checkpoints.load_state(output / "last" / "state.pt")
    assert state is not None
    return state


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The last checkpoint of a run that nothing disturbed, and its folder."""
    output = tmp_path_factory.mktemp("whole") / "run"
    return train(quick(), data, output), output


def test_killed_while_files_are_written(data: Path, whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    undisturbed, its_folder = whole
    output = tmp_path / "run"
    # 1 is settings.json, 2 start.json, then three steps' states, then an evaluation's four files, its state, and so on.
    for number in (1, 2, 5, 4, 3):
        process = start(quick(), data, output, die_at_replacement, number)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    require_equal(train(quick(), data, output), undisturbed)
    names = ("best/model.safetensors", "last/model.safetensors", "best/result.json", "log.csv", "result.json")
    require_same_files(output, its_folder, names)
    assert not list(output.rglob("*.unfinished"))


def test_killed_at_any_moment_in_half_precision(data: Path, whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    settings = quick(precision="bf16")
    undisturbed = train(settings, data, tmp_path / "whole")
    ends = []
    for delay in (0.001, 0.02):
        # From its next checkpoint on, or its start would be all that is ever disturbed.
        process = start(settings, data, tmp_path / "run", die_after_state, delay)
        process.join()
        ends.append(process.exitcode)
    assert ends[0] == -signal.SIGVTALRM and set(ends) <= {-signal.SIGVTALRM, 0}, ends
    require_equal(train(settings, data, tmp_path / "run"), undisturbed)
    exact, rounded = (state["position"]["rows"][0]["train_loss"] for state in (whole[0], undisturbed))
    assert exact != rounded and exact == pytest.approx(rounded, rel=0.01)


def test_finished_run_is_left_alone(data: Path, whole: tuple[dict[str, Any], Path]) -> None:
    state = whole[1] / "last" / "state.pt"
    before = state.stat().st_mtime_ns  # not all of stat(), where the time of the last reading changes
    require_equal(train(quick(), data, whole[1]), whole[0])
    assert state.stat().st_mtime_ns == before


def test_other_settings_in_the_same_folder(data: Path, whole: tuple[dict[str, Any], Path]) -> None:
    with pytest.raises(ValueError, match=r"lr: .*drop_path: "):
        finetune(quick(lr=0.1, drop_path=0.0), data, whole[1])
    finetune(quick(workers=1, checkpoint_minutes=3.0), data, whole[1])  # decide nothing about the weights


def test_loss_that_is_not_a_number_stops_before_it_spoils_anything(data: Path, tmp_path: Path) -> None:
    settings = quick(lr=1e30, warmup_epochs=0.5, warmup_lr=0.0, clip_grad=0.0, ema_decay=0.0)
    with pytest.raises(ValueError, match="lower lr"):
        finetune(settings, data, tmp_path / "run")
    state = checkpoints.load_state(tmp_path / "run" / "last" / "state.pt")
    assert state is not None and state["position"]["step"] >= 1
    assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_gradient_that_is_not_a_number_stops_it_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of = Objective.__call__

    def steep(self: Objective, forward: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self, forward, inputs, targets)
        bias = self.model.get_parameter("head.bias")
        # Adds 0, whose slope is infinite, from the second step on: the bias starts as 0 and then is not.
        return loss + (bias * 0).abs().sqrt().sum() if bias.abs().sum() > 0 else loss

    monkeypatch.setattr(Objective, "__call__", steep)
    with pytest.raises(ValueError, match="gradient's norm is nan in epoch 1, step 1"):
        finetune(quick(clip_grad=1.0, warmup_epochs=0.0), data, tmp_path)
    state = checkpoints.load_state(tmp_path / "last" / "state.pt")
    assert state is not None and state["position"]["step"] == 1
    assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_unreadable_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoints.load_state(tmp_path / "state.pt")
    assert checkpoints.load_state(tmp_path / "none.pt") is None
