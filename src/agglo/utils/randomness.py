"""Seeds that depend on the position in a run, so that a resumed run draws what it would have drawn."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def derived_seed(*parts: Any) -> int:
    """Return a 63-bit seed; other parts give an unrelated one.

    >>> derived_seed(0, "order", 1) == derived_seed(0, "order", 1) != derived_seed(0, "order", 2)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(*parts: Any) -> None:
    """Seed the global generators of Python, NumPy and torch: timm's augmentations draw from all three."""
    seed = derived_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 timm's Mixup draws from NumPy's global generator
    torch.manual_seed(seed)


def generator(*parts: Any) -> torch.Generator:
    """Return a new CPU generator with a derived seed."""
    return torch.Generator().manual_seed(derived_seed(*parts))
