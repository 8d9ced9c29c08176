"""Docstrings as Markdown for the API pages: sections and their entries become lists, examples become code.

agglo's docstrings are written to be read in a terminal: a section is a line that ends with a colon and an indented
block, an entry is `name: what it is`, and an example begins with `>>>`.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_SECTION = re.compile(r"^(?P<title>[A-Z][^`]*):$")
_ENTRY = re.compile(r"^(?P<name>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*(?: \([^)]*\))?): (?P<about>.*)$")


class DocstringsAsMarkdown(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """A docstring in Markdown.

    >>> print(markdown("Sums up.\\n\\nWhat matters:\\n    x: a number,\\n        or two."))
    Sums up.
    <BLANKLINE>
    **What matters**
    <BLANKLINE>
    - `x`: a number,
      or two.
    """
    return "\n\n".join(_paragraph(part) for part in _paragraphs(docstring))


def _paragraphs(text: str) -> list[str]:
    """Paragraphs, where a section with its block is one, and so is an example."""
    return [part.strip("\n") for part in re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n")) if part.strip()]


def _paragraph(part: str) -> str:
    if part.lstrip().startswith(">>>"):
        return f"```pycon\n{textwrap.dedent(part)}\n```"
    first, _, rest = part.partition("\n")
    section = _SECTION.match(first)
    if section and rest:
        return f"**{section['title']}**\n\n{_entries(textwrap.dedent(rest))}"
    return _entries(part)


def _entries(block: str) -> str:
    """A list if the block begins with `name: ...`, the words as they are otherwise."""
    lines = block.splitlines()
    if not _ENTRY.match(lines[0]):
        return block
    done = []
    for line in lines:
        entry = None if line.startswith(" ") else _ENTRY.match(line)
        if entry:
            name, _, aside = entry["name"].partition(" (")
            names = ", ".join(f"`{one}`" for one in name.split(", "))
            done.append(f"- {names}{f' ({aside}' if aside else ''}: {entry['about']}")
        else:
            done.append(f"  {line.strip()}" if line.startswith(" ") else f"- {line}")
    return "\n".join(done)
