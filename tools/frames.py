"""Count the files of agglo with a frame in one forward pass of a reduced timm model.

python -m tools.frames              # model(x)
python -m tools.frames evaluate     # agglo evaluate on two images of the demo's data
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import timm
import torch

import agglo

HOUSE = str(Path(agglo.__file__).parent)


def files_of(call: Any) -> list[str]:
    """Return the files of agglo, in order of first use, that a call runs functions of."""
    found: dict[str, None] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            found.setdefault(frame.f_code.co_filename.removeprefix(HOUSE + "/"))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def main() -> None:
    model = agglo.apply(timm.create_model("deit_tiny_patch16_224").eval(), keep_rate=0.5)
    with torch.no_grad():
        files = files_of(lambda: model(torch.rand(2, 3, 224, 224)))
    print("\n".join([*files, f"{len(files)} files"]))


if __name__ == "__main__":
    main()
