"""The clustering kernels with one thing changed in their source, to see whether anybody notices."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from triton.runtime.interpreter import InterpretedFunction

from agglo.clustering.linkage import triton as backend

SOURCE = Path(str(backend.__file__))
BARRIER = "tl.debug_barrier()"
# Every thread sleeps for up to two microseconds, by its number and the clock.
_DELAY = '''

@triton.jit
def _delay():
    tl.inline_asm_elementwise(
        """{ .reg .u32 t, id; mov.u32 t, %clock; mov.u32 id, %tid.x; mad.lo.u32 t, id, 40503, t;
        and.b32 t, t, 2047; nanosleep.u32 t; mov.u32 $0, t; }""",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )

'''


def barrier_lines() -> list[int]:
    """Return the line of every barrier in the backend."""
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, start=1) if BARRIER in line]


def without_barrier(number: int | None) -> ModuleType:
    """Import the backend with one of its barriers deleted, on the same lines."""
    parts = SOURCE.read_text(encoding="utf-8").split(BARRIER)
    text = parts[0]
    for at, part in enumerate(parts[1:]):
        text += ("pass" if at == number else BARRIER) + part
    return _load(text)


def with_delays() -> ModuleType:
    """Import the backend with a delay before every store."""
    text = re.sub(
        r"^( +)(?=tl\.(?:store|atomic_min)\()", r"\1_delay()\n\1", SOURCE.read_text(encoding="utf-8"), flags=re.M
    )
    first = text.index("\n\n@triton.jit")
    return _load(text[:first] + _DELAY + text[first:])


def _load(text: str) -> ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "triton_mutant.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("triton_mutant", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["triton_mutant"] = module
        spec.loader.exec_module(module)
        for kernel in list(vars(module).values()):
            if isinstance(kernel, InterpretedFunction):
                kernel.rewrite()  # reads its source, which is about to go
    return module
