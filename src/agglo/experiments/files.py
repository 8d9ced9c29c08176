"""Files that are whole or not there: a crash, a kill or a full disk leaves the file from before."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_UNFINISHED = ".unfinished"
_FULL = 1 << 20  # bytes left on a disk on which a checkpoint of some MB just failed
_HEADER_LENGTH = 8  # bytes, of a safetensors file
_KINDS = {"a folder": stat.S_ISDIR, "a device": stat.S_ISCHR, "a disk": stat.S_ISBLK, "a pipe": stat.S_ISFIFO}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write; what is there afterwards takes the place of `path`, on the disk, in one step.

    Several processes may write the same file: each has a path of its own, and the last one to finish stays. The file
    has the mode that any new file has, whatever the writer does.
    """
    require_output(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}")
    with unfinished.open("xb") as created:
        mode = stat.S_IMODE(os.fstat(created.fileno()).st_mode)
    try:
        yield unfinished
        unfinished.chmod(mode)  # safetensors puts a file of its own there, which only its owner may read
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """JSON that a reader never meets half of."""
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def require_output(path: Path) -> Path:
    """The path itself, if a file can be written there; called before any work is done.

    What is there already must be a regular file: a device or a pipe would be replaced by one, and reading it to go on
    with an earlier run might never end.
    """
    if not path.parent.is_dir():
        raise ValueError(f"output={str(path)!r} lies in no folder: {str(path.parent)!r} does not exist")
    if path.exists() and not path.is_file():
        mode = path.stat().st_mode
        kind = next((kind for kind, test in _KINDS.items() if test(mode)), "something else")
        raise ValueError(f"output={str(path)!r} is {kind}; a regular file, or a name that is free, is accepted")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"output={str(path)!r} cannot be written: {str(path.parent)!r} is read-only")
    return path


def remove_unfinished(folder: Path) -> None:
    """Clear away what a killed run was writing."""
    for path in folder.rglob(f"*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Everything a run needs to go on, in one file.

    Raises OSError, which says what went wrong and whether the file before is intact.
    """

    def write(unfinished: Path) -> None:
        # Given a name, torch would write it into the file, and no two files would be equal.
        with unfinished.open("wb") as file:
            torch.save(dict(state), file)

    _written(path, write)


def load_state(path: Path) -> dict[str, Any] | None:
    """What `save_state` wrote; None if nothing was. Nothing in the file is executed."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"checkpoint {str(path)!r} cannot be read; remove it to start again: {error}") from error
    return state


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A state dict as safetensors, for `agglo evaluate --checkpoint` and anything else. The same weights and words give
    the same bytes."""
    from safetensors.torch import save_file

    # Tensors that share memory (tied weights) are refused; copies are what a reader would get anyway.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}

    def write(unfinished: Path) -> None:
        # Given no words but a dict, safetensors 0.8 writes a header that is no JSON where there are no weights either.
        save_file(copies, unfinished, metadata=dict(about) or None)
        _sort_metadata(unfinished)

    _written(path, write)


def _sort_metadata(path: Path) -> None:
    """The library writes the words about a file in another order every time: put them in order, in place.

    The file is the header's length in 8 bytes, the header in JSON, padded with spaces, then the tensors.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        header = json.loads(file.read(length))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) != length:
            raise ValueError(f"the header of {path.name} takes {len(text)} bytes, and safetensors gave it {length}")
        file.seek(_HEADER_LENGTH)
        file.write(text)


def _written(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as unfinished, _saying_if_full(path.parent):
            write(unfinished)
    except Exception as error:
        left = "the one before is intact" if path.exists() else "there was none before"
        raise OSError(f"checkpoint {str(path)!r} could not be written, {left}: {error}") from error


@contextmanager
def _saying_if_full(folder: Path) -> Iterator[None]:
    """Writers in C++ and Rust report a full disk by errors that do not say so: look at the disk before what they wrote
    is removed."""
    try:
        yield
    except Exception as error:
        if shutil.disk_usage(folder).free < _FULL:
            raise OSError("the disk is full") from error
        raise
