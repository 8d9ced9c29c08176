"""Files that are whole or not there, of the usual mode."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from agglo.utils.files import (
    load_state,
    remove_unfinished,
    replacing,
    require_output,
    save_state,
    save_weights,
    write_json,
)

ABOUT = {f"key{number}": f'value {number} \u00e9 "quoted"\n' for number in range(12)}
WEIGHTS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0)}


@pytest.fixture
def umask() -> Any:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_file_has_the_mode_of_any_new_file(tmp_path: Path, umask: int) -> None:
    (tmp_path / "usual").touch()
    write_json(tmp_path / "a.json", [1])
    save_state(tmp_path / "a.pt", {"step": 1})
    save_weights(tmp_path / "a.safetensors", WEIGHTS, ABOUT)
    assert {mode(path) for path in tmp_path.iterdir()} == {0o640} == {0o666 & ~umask}


def test_what_was_saved_can_be_read_again_and_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    assert load_state(tmp_path / "0.pt") is None
    for run in range(2):
        save_state(tmp_path / f"{run}.pt", {"model": WEIGHTS, "step": 3})
    found = load_state(tmp_path / "0.pt")
    assert found is not None and found["step"] == 3 and torch.equal(found["model"]["b"], WEIGHTS["b"])
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    path = tmp_path / "deep" / "w.safetensors"
    save_weights(path, WEIGHTS, ABOUT)
    read = load_file(path)
    assert set(read) == set(WEIGHTS)
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in WEIGHTS.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == ABOUT
    save_weights(path, {}, {})
    assert load_file(path) == {}


def write_often(path: Path, value: int) -> None:
    for _ in range(8):
        write_json(path, [value] * 2000)


def test_two_processes_can_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(path, value)) for value in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            content = json.loads(path.read_text())
            assert len(content) == 2000 and len(set(content)) == 1
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["shared.json"]


def test_what_fails_leaves_the_file_from_before_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(OSError, match="No such file"), replacing(path) as unfinished:
        unfinished.rename(tmp_path / "elsewhere").unlink()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_state(path, {"a": lambda: None})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    (tmp_path / "a.json.77-abc.unfinished").touch()
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_refused_and_left_as_it_is(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "out"
    make(path)
    before = path.stat().st_mode
    for write in (require_output, lambda path: write_json(path, {})):
        with pytest.raises(ValueError, match="no regular file"):
            write(path)
    assert path.stat().st_mode == before and list(tmp_path.iterdir()) == [path]
    assert require_output(tmp_path / "a.json") == tmp_path / "a.json"
    with pytest.raises(ValueError, match=r"no/a\.json"):
        require_output(tmp_path / "no" / "a.json")
