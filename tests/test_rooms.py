"""Who may call whom: imports between the rooms of the package go downwards only, and never in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "agglo"

# From the ground up. A room may import rooms of lower floors, and itself; rooms of one floor do not know each other.
LIBRARY: tuple[tuple[str, ...], ...] = (
    ("version", "compiling", "checks", "text"),
    ("clustering",),
    ("schedule", "grouping", "attention"),
    ("methods",),
    ("config",),
    ("budget", "plan", "tracing", "tuned"),
    ("hosts",),
    ("patch",),
    ("drawing", "embedded", "testing", "utils"),
    ("models",),
    ("tuning",),
    ("healing",),
)
LABORATORY: tuple[tuple[str, ...], ...] = (
    ("lab.options",),
    ("lab.data", "lab.drawing"),
    ("lab.evaluation", "lab.training"),
    ("lab.tasks.classification", "lab.tasks.synthesis", "lab.tasks.detection"),
    ("lab",),  # what scripts call
    ("lab.bench",),
    ("lab.paper",),
    ("lab.demo", "lab.playground"),
    ("lab.cli",),
    ("__main__",),
)
FLOORS = LIBRARY + LABORATORY
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ROOT = ""  # agglo itself: what users import; it may import any room, and no room may import it


class Import(NamedTuple):
    file: Path
    line: int
    room: str
    imported: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.room or 'agglo'} imports {self.imported or 'agglo itself'}"


def room_of(module: str) -> str:
    """The innermost room that a dotted name lies in.

    >>> room_of("agglo.hosts.common.loop"), room_of("agglo.lab.tasks.detection.specs"), room_of("agglo")
    ('hosts', 'lab.tasks.detection', '')
    """
    parts = module.split(".")[1:]
    inside = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((room for room in inside if room in FLOOR), parts[0] if parts else ROOT)


@cache
def imports(package: Path) -> list[Import]:
    """Every import of one room by another, in functions and behind TYPE_CHECKING too."""
    return list(_imports(package))


def _imports(package: Path) -> Iterator[Import]:
    rooms = {path.stem if path.suffix == ".py" else path.name for path in package.iterdir()}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in _modules(node, rooms):
                if module.split(".")[0] == "agglo" and room_of(module) != room_of(name):
                    yield Import(path.relative_to(package.parent), node.lineno, room_of(name), room_of(module))  # type: ignore[attr-defined]


def _modules(node: ast.AST, rooms: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are written out, not relative"
        # `from agglo import patch` imports that room, not the root.
        is_root = node.module == "agglo"
        return [f"agglo.{a.name}" if is_root and a.name in rooms else str(node.module) for a in node.names]
    return []


def wrong(found: Import) -> bool:
    if found.room == ROOT:
        return False
    return found.imported == ROOT or FLOOR[found.imported] >= FLOOR[found.room]


def test_every_room_has_a_floor() -> None:
    folders = {"": PACKAGE, "lab.": PACKAGE / "lab", "lab.tasks.": PACKAGE / "lab" / "tasks"}
    rooms = {f"{inside}{path.stem}" for inside, folder in folders.items() for path in folder.iterdir()}
    assert {room for room in rooms if "__init__" not in room and "__pycache__" not in room} - {"py"} <= {
        *FLOOR,
        "lab.tasks",
    }


def test_imports_go_downwards() -> None:
    upwards = [str(found) for found in imports(PACKAGE) if wrong(found)]
    assert not upwards, "\n" + "\n".join(upwards)


def test_only_the_page_knows_gradio() -> None:
    """What the playground computes can be called and tested without the library that lays it out."""
    files = (PACKAGE / "lab" / "playground").rglob("*.py")
    importing = {path.name for path in files if re.search(r"^\s*(import|from) gradio", path.read_text(), re.MULTILINE)}
    assert importing == {"tabs.py", "serving.py"}


@pytest.mark.parametrize(
    ("room", "text", "imported"),
    [
        ("methods", "from agglo.hosts.common.swap import ReducedModule", "hosts"),
        ("methods", "import agglo", ROOT),
        ("models", "def f():\n    from agglo import tuning", "tuning"),
        ("methods", "from agglo.grouping import Grouping\nfrom agglo.methods import base", None),
    ],
)
def test_a_wrong_import_is_found_with_its_line(tmp_path: Path, room: str, text: str, imported: str | None) -> None:
    package = tmp_path / "agglo"
    for folder in {room, "tuning", "hosts"}:
        (package / folder).mkdir(parents=True)
    (package / room / "file.py").write_text(text)
    found = [(entry.room, entry.imported, entry.line) for entry in imports(package) if wrong(entry)]
    assert found == ([] if imported is None else [(room, imported, text.count("\n") + 1)])
