"""Where real weights and images are, for tests that skip without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_path(name: str) -> Path:
    """A file of the data folder (AGGLO_DATA, or shared/data beside the repository); skips the test if absent."""
    folder = Path(os.environ.get("AGGLO_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    path = folder / name
    if not path.exists():
        pytest.skip(f"{name} is not in the data folder; AGGLO_DATA says where it is")
    return path
