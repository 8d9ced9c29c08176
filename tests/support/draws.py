"""Random numbers that depend on a name alone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed(name: str) -> None:
    """Seed every global generator from a name."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 libraries draw from it
    torch.manual_seed(number)


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed every global generator from a name, and put back what they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    seed(name)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
