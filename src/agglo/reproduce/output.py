"""Writes what an item has found: tables in Markdown and LaTeX, and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agglo.experiments.files import replacing
from agglo.reproduce.item import Item, Result, Section, Settings, key_of
from agglo.reproduce.record import where

MARKDOWN, LATEX = "tables.md", "tables.tex"


def write_output(item: Item, results: Sequence[Result], settings: Settings) -> Path:
    """Everything that follows from a record, in the item's folder, which is returned."""
    results = in_order(item, results, settings)
    folder = settings.folder(item.name)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = item.draw(results, settings, folder)
    sections = item.sections(results, settings)
    _write(folder / MARKDOWN, markdown(item, results, sections, settings, pictures))
    _write(folder / LATEX, latex(item, sections))
    return folder


def in_order(item: Item, results: Sequence[Result], settings: Settings) -> list[Result]:
    """As the item's cells come, whenever they were found; what it does not ask for by itself, such as further seeds,
    comes last."""
    places = {cell.key: place for place, cell in enumerate(item.cells(settings))}
    return sorted(results, key=lambda result: places.get(key_of(result.get("cell", {})), len(places)))


def markdown(
    item: Item, results: Sequence[Result], sections: Sequence[Section], settings: Settings, pictures: Sequence[Path]
) -> str:
    """A page: what the item is, where it ran, its tables and pictures."""
    parts = [f"# {item.name}: {item.shows}", head(item, [*results, *item.borrowed(settings)], settings)]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [part for part in (section.text, section.table and section.table.markdown()) if part]
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    return "\n\n".join(parts) + "\n"


def head(item: Item, results: Sequence[Result], settings: Settings) -> str:
    """What was measured, by which command, where and when."""
    command = f"agglo reproduce {item.name}{' --miniature' if settings.miniature else ''}"
    stands_in = f" {item.miniature_about}" if settings.miniature and item.miniature_about else ""
    from_print = not results and not item.cells(settings)  # nothing was measured, and nothing had to be
    source = "from the printed numbers alone" if from_print else where(results)
    return f"{item.about}.{stands_in} `{command}`; {source}."


def latex(item: Item, sections: Sequence[Section]) -> str:
    """The tables alone, each under a comment that says which it is."""
    tables = [f"% {item.name}: {s.title}\n{s.table.latex()}" for s in sections if s.table is not None]
    return "\n\n".join(tables) + "\n"


def _write(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
