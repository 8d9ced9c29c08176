"""One model, many visitors: whoever wants to reduce and run it has it alone until done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Lent(Generic[T]):
    """A thing that is made when it is first wanted, and lent to one borrower at a time.

    A reduction is applied to the model itself: without this, a visitor's pass could begin with what another visitor
    applied a moment later. It also keeps passes of one model from slowing each other down while they are timed.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T | None = None
        self._lock = threading.Lock()

    @contextmanager
    def borrowed(self) -> Iterator[T]:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            yield self._made
