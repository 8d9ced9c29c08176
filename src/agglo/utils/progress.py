"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta


@contextmanager
def progress(
    total: int, description: str, *, start: int = 0, every_seconds: float = 0.0, quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after every step, with a short note about it.

    Args:
        start: Steps that an earlier run did.
        every_seconds: Least time between two plain lines, which then show the rate and the time left; 0 prints all.
    """
    done, began = start, time.monotonic()
    printed = began
    end = "\r" if sys.stderr.isatty() else "\n"  # a line on a terminal is written over by the next one

    def advance(note: str) -> None:
        nonlocal done, printed
        done += 1
        now = time.monotonic()
        if quiet or (every_seconds and now - printed < every_seconds and done < total and end == "\n"):
            return
        printed = now
        rate = (done - start) / max(now - began, 1e-9)
        left = f" {rate:.3g}/s, {timedelta(seconds=int((total - done) / rate))} left" if every_seconds else ""
        clear = "\x1b[K" if end == "\r" else ""
        print(f"{description} {done}/{total}{left} {note}{clear}", end=end, file=sys.stderr, flush=True)

    yield advance
    if end == "\r" and not quiet:
        print(file=sys.stderr)
