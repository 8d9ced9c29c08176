"""A method whose decisions are observed, to time them or to see what it compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from agglo.methods.base import Method, Outcome, View

Reduce = Callable[[View], Outcome]


def watched(method: Method, around: Callable[[Reduce, View], Outcome]) -> Method:
    """Return the same method, each of whose decisions goes through `around`.

    `around` is given the method's own `reduce` and the view, and returns what that returns.
    """
    kind: Any = type(method)

    class Watched(kind):
        def reduce(self, view: View) -> Outcome:
            return around(super().reduce, view)

    twin = copy.copy(method)
    twin.__class__ = Watched
    return twin
