"""`agglo play` as a person starts it: in a process of its own, with a home and a working directory of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import HANGS


@dataclass(frozen=True)
class Played:
    """address: of the page. work, home, temporary: the only folders it knows of."""

    address: str
    work: Path
    home: Path
    temporary: Path
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """As Ctrl+C does."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(HANGS)


@contextmanager
def played(folder: Path, *arguments: str) -> Iterator[Played]:
    work, home, temporary = (folder / name for name in ("work", "home", "temporary"))
    for each in (work, home, temporary):
        each.mkdir(parents=True)
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(home / ".cache")}
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "agglo", "play", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=(folder / "errors.txt").open("w"),
        text=True,
        cwd=work,
        env=environment,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "the page is at http" in line, (folder / "errors.txt").read_text()
        yield Played(line.split("at ")[1].split(" ")[0], work, home, temporary, process)
    finally:
        process.kill()
        process.wait()


def client(address: str) -> Any:
    """As another program asks the page."""
    from gradio_client import Client

    # A machine that does other things as well may take long to answer.
    return Client(address, verbose=False, analytics_enabled=False, httpx_kwargs={"timeout": HANGS})
