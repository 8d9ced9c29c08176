"""Count the files of agglo with a frame in one forward pass of a reduced timm model, or in a command.

python -m tools.frames              # model(x)
python -m tools.frames evaluate     # agglo evaluate, on six random images
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import timm
import torch

import agglo
from agglo.lab.cli import main as command
from tests.support.tiny_models import timm_folder, write_images

HOUSE = str(Path(agglo.__file__).parent)


def files_of(call: Callable[[], object]) -> list[str]:
    """Return the files of agglo, in order of first use, whose functions the second call runs, in whatever thread."""
    found: dict[str, None] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            found.setdefault(frame.f_code.co_filename.removeprefix(HOUSE + "/"))

    call()  # what is imported or compiled at first use is no frame of the call itself
    threading.setprofile(profile)
    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    return list(found)


if __name__ == "__main__":
    if sys.argv[1:] == ["evaluate"]:
        with tempfile.TemporaryDirectory() as folder:
            data, tiny = write_images(Path(folder) / "data", each=1), timm_folder(Path(folder) / "model")
            given = ["evaluate", f"local-dir:{tiny}", "--data", str(data), "--keep-rate", "0.5", "--workers", "0"]
            files = files_of(lambda: command(given))
    else:
        model = agglo.apply(timm.create_model("deit_tiny_patch16_224").eval(), keep_rate=0.5)
        files = files_of(torch.no_grad()(lambda: model(torch.rand(2, 3, 224, 224))))
    laboratory = sum(file.startswith("lab/") for file in files)
    print("\n".join([*files, f"{len(files)} files, {laboratory} of them of the laboratory"]))
