"""Models that several visitors share, and work that reports its progress."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Locked(Generic[T]):
    """A value that is made when it is first used, and used by one thread at a time.

    A reduction is applied to the model itself: without the lock, a visitor's pass could begin with what another visitor
    applied a moment later. It also keeps passes of one model from slowing each other down while they are timed.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._value: T | None = None
        self._lock = threading.Lock()

    @contextmanager
    def use(self) -> Iterator[T]:
        with self._lock:
            if self._value is None:
                self._value = self._make()
            yield self._value


class StoppedError(Exception):
    """Raised in the work when nobody reads its reports any more."""


def streamed(work: Callable[[Callable[[T], None]], None]) -> Iterator[T]:
    """Run `work(report)` in a thread and yield what it reports, in order.

    An error of the work is raised where the iterator is read. Once the iterator is closed, the next report raises
    StoppedError in the work.
    """
    reports: queue.Queue[tuple[bool, Any]] = queue.Queue()  # whether it is the end, and a report or an error
    closed = threading.Event()

    def report(value: T) -> None:
        if closed.is_set():
            raise StoppedError
        reports.put((False, value))

    def run() -> None:
        error = None
        try:
            work(report)
        except BaseException as raised:
            error = raised
        reports.put((True, error))

    threading.Thread(target=run, daemon=True).start()  # a page that is stopped does not wait for it
    try:
        while True:
            is_end, value = reports.get()
            if not is_end:
                yield value
            elif value is None:
                return
            else:
                raise value
    finally:
        closed.set()
