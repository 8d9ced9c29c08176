"""Files that are whole or not there: a crash, a kill or a full disk leaves the file from before."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_UNFINISHED = ".unfinished"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, which atomically replaces `path` afterwards, and is synced to the disk.

    Several processes may write the same file: each writes to another path, and the last one to finish stays. The file
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
    if os.name == "posix":  # the name of the new file is part of its folder
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def require_output(path: Path) -> Path:
    """Return the path if a file can be written there; to be called before any work is done.

    Raises:
        ValueError: Its folder does not exist or is read-only, or the path is not a regular file: a device or a pipe
            would be replaced by one, and reading it to continue an earlier run might never end.
    """
    if not path.parent.is_dir():
        raise ValueError(f"output={str(path)!r} lies in no folder: {str(path.parent)!r} does not exist")
    if path.exists() and not path.is_file():
        raise ValueError(f"output={str(path)!r} is no regular file; such a file, or a name that is free, is accepted")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"output={str(path)!r} cannot be written: {str(path.parent)!r} is read-only")
    return path


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that a killed run left in a folder."""
    for path in folder.rglob(f"*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write everything that a run needs to be resumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Given a name, torch would write it into the file, and no two files would be equal.
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        torch.save(dict(state), file)


def load_state(path: Path) -> dict[str, Any] | None:
    """Return what `save_state` wrote, or None without a file. Nothing in the file is executed."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"checkpoint {str(path)!r} cannot be read; remove it to start again: {error}") from error
    return state


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write a state dict as safetensors, with metadata."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    # Tensors that share memory (tied weights) are refused; copies are what a reader would get anyway.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    with replacing(path) as unfinished:
        # Given an empty dict, safetensors 0.8 writes a header that is no JSON where there are no weights either.
        save_file(copies, unfinished, metadata=dict(about) or None)
