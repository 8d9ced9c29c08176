"""How far a long run is, on stderr: tqdm's bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(total: int, description: str) -> Iterator[Callable[[str], None]]:
    """Gives a function to call with a word on every step done."""
    if sys.stderr.isatty() and find_spec("tqdm") is not None:
        from tqdm import tqdm

        with tqdm(total=total, desc=description, file=sys.stderr, leave=False) as bar:

            def advance(note: str) -> None:
                bar.set_postfix_str(note, refresh=False)
                bar.update()

            yield advance
    else:
        done = 0

        def tell(note: str) -> None:
            nonlocal done
            done += 1
            print(f"{description} {done}/{total} {note}", file=sys.stderr, flush=True)

        yield tell
