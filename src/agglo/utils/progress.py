"""Progress on stderr: tqdm's bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec


@contextmanager
def progress(
    total: int, description: str, *, start: int = 0, every_seconds: float = 0.0, quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after every step, with a short note about it.

    Args:
        total: Number of steps.
        description: Shown in front.
        start: Steps that an earlier run did.
        every_seconds: Least time between two plain lines, which then show the rate and the time left; 0 prints all.
        quiet: Show nothing.
    """
    if quiet:
        yield lambda note: None
    elif sys.stderr.isatty() and find_spec("tqdm") is not None:
        from tqdm import tqdm

        with tqdm(total=total, initial=start, desc=description, file=sys.stderr, leave=False) as bar:

            def advance(note: str) -> None:
                bar.set_postfix_str(note, refresh=False)
                bar.update()

            yield advance
    else:
        done, began = start, time.monotonic()
        printed = began

        def print_line(note: str) -> None:
            nonlocal done, printed
            done += 1
            now = time.monotonic()
            if every_seconds and now - printed < every_seconds and done < total:
                return
            printed = now
            rate = (done - start) / max(now - began, 1e-9)
            left = f" {rate:.3g}/s, {timedelta(seconds=int((total - done) / rate))} left" if every_seconds else ""
            print(f"{description} {done}/{total}{left} {note}", file=sys.stderr, flush=True)

        yield print_line
