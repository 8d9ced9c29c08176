"""Randomness as a function of where training stands, so that a run which goes on draws what it would have drawn."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def derived_seed(*parts: Any) -> int:
    """A seed (63 bits) for one purpose at one place: other parts give an unrelated one.

    >>> derived_seed(0, "order", 1) == derived_seed(0, "order", 1) != derived_seed(0, "order", 2)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(*parts: Any) -> None:
    """Start the generators of Python, NumPy and torch afresh: timm's augmentations draw from all three."""
    seed = derived_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 timm's Mixup draws from NumPy's global generator
    torch.manual_seed(seed)


def generator(*parts: Any) -> torch.Generator:
    """A generator of its own, on the CPU."""
    return torch.Generator().manual_seed(derived_seed(*parts))
