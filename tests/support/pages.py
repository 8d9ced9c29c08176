"""The pages of the documentation as the tests read them: worked examples, commands, links.

Every ```python block of a page is run, in the page's order and in one namespace, as a reader would type it. Marks,
which are comments of Markdown and not seen by readers, say otherwise:

    <!-- example: NAME -->        a new namespace begins: what was defined above is forgotten
    <!-- before                   code that runs at this place and is not shown: what the reader has already
    model = ...
    -->
    <!-- check                    the same, for what must be true after the code above
    assert ...
    -->
    ```python NAME                the block belongs to the example NAME, wherever it stands
    <!-- run -->                  the `agglo` commands of the block below are run, in the folder of the example
    <!-- not run: REASON -->      the block below needs what a test has not: a download, a GPU, hours
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PARTS = re.compile(
    r"^<!-- example: (?P<example>[^\n]*?) -->$"
    r"|^<!-- not run: (?P<reason>[^\n]*?) -->$"
    r"|^<!-- (?P<run>run) -->$"
    r"|^<!-- (?:before|check)\n(?P<hidden>.*?)^-->$"
    r"|^(?P<indent>[ ]*)(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Example:
    """Code of a page that is run as one program. `source` has it on the page's own lines, so that errors name them."""

    page: Path
    name: str
    chunks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}{f':{self.name}' if self.name else ''}"

    @property
    def source(self) -> str:
        lines: list[str] = []
        for line, code in self.chunks:
            lines += [""] * (line - 1 - len(lines)) + code.splitlines()
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Fence:
    """One fenced block: the line of its first code, its language, its code, and why it is not run (None if it is)."""

    line: int
    language: str
    code: str
    reason: str | None
    hidden: bool = False
    run: bool = False
    name: str = ""


def all_pages() -> list[Path]:
    """Everything that is written for readers: the pages of docs/ and those at the top of the repository."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page: Path, text: str | None = None) -> list[Example]:
    """The programs of a page, empty ones left out."""
    found = [Example(page, "")]
    named: dict[str, Example] = {}
    for part in _read(page.read_text(encoding="utf-8") if text is None else text):
        if isinstance(part, str):
            found.append(Example(page, part))
        elif part.language == "python" and part.reason is None:
            example = named.setdefault(part.name, Example(page, part.name)) if part.name else found[-1]
            example.chunks.append((part.line, part.code))
        elif part.run:
            found[-1].chunks.append((part.line, "\n".join(map(_call, commands(part)))))
    return [example for example in (*found, *named.values()) if example.chunks]


def fences(text: str) -> list[Fence]:
    """Every fenced block of a page that readers see."""
    return [part for part in _read(text) if isinstance(part, Fence) and not part.hidden]


def commands(fence: Fence) -> list[list[str]]:
    """The `agglo` and `make` commands of a block, as words, without comments and those that leave something open."""
    if fence.language not in ("", "bash", "console", "sh"):
        return []
    lines = [
        re.sub(r"\s#.*", "", line).removeprefix("$ ").strip() for line in fence.code.replace("\\\n", " ").splitlines()
    ]
    return [shlex.split(line) for line in lines if line.startswith(("agglo ", "make ")) and "..." not in line]


def _call(words: list[str]) -> str:
    """Python that runs a command."""
    return f"import agglo.lab.cli; assert agglo.lab.cli.main({words[1:]!r}) == 0, {shlex.join(words)!r}"


def _read(text: str) -> Iterator[str | Fence]:
    """Names of examples, and blocks; hidden code is a block of Python."""
    reason, run = None, False
    for match in _PARTS.finditer(text):
        if match["example"] is not None:
            yield match["example"]
        elif match["reason"] is not None:
            reason = match["reason"]
            continue
        elif match["run"]:
            run = True
            continue
        elif match["hidden"] is not None:
            yield Fence(text.count("\n", 0, match.start("hidden")) + 1, "python", match["hidden"], None, hidden=True)
        else:
            indent = len(match["indent"])
            code = "\n".join(line[indent:] for line in match["code"].splitlines())
            line = text.count("\n", 0, match.start("code")) + 1
            language, _, name = match["language"].strip().partition(" ")
            yield Fence(line, language, code, reason, run=run, name=name.strip())
        reason, run = None, False
