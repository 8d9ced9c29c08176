"""Work that tells how it goes on, as an iterator: each thing it says, while it works on in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()


class StoppedError(Exception):
    """Nobody listens any more."""


def streamed(work: Callable[[Callable[[T], None]], None]) -> Iterator[T]:
    """What `work` says through the function it is given, in order. Its error is raised where the iterator is read. Once
    the iterator is closed, the next thing that is said raises StoppedError in the work."""
    said: queue.Queue[Any] = queue.Queue()
    closed = threading.Event()

    def say(thing: T) -> None:
        if closed.is_set():
            raise StoppedError
        said.put(thing)

    def run() -> None:
        try:
            work(say)
        except StoppedError:
            pass
        except BaseException as error:
            said.put((_END, error))
            return
        said.put((_END, None))

    threading.Thread(target=run, daemon=True).start()
    try:
        while True:
            thing = said.get()
            if isinstance(thing, tuple) and thing and thing[0] is _END:
                if thing[1] is not None:
                    raise thing[1]
                return
            yield thing
    finally:
        closed.set()
