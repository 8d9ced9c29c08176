"""Tokens of a group become one: kernels for what `agglo.grouping` defines."""

from functools import cache
from typing import Any


@cache
def kernels() -> Any:
    """Return the CPU's kernels, which load when they are first needed."""
    from agglo.clustering.merge import cpu

    return cpu
