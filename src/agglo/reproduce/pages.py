"""Text that a command writes into a page, between two marks, so that no figure there is typed by hand."""

from __future__ import annotations

from pathlib import Path

from agglo.reproduce.item import Item, Settings
from agglo.reproduce.output import head, in_order
from agglo.reproduce.record import read_results


def replace_between_marks(page: str, name: str, text: str) -> str:
    """A page with what stands between `<!-- name: ... -->` and `<!-- end of name -->` replaced.

    >>> replace_between_marks("a <!-- n: make it -->old<!-- end of n --> z", "n", "new")
    'a <!-- n: make it -->\\nnew\\n<!-- end of n --> z'
    """
    before, begin, rest = page.partition(f"<!-- {name}:")
    how, closing, rest = rest.partition("-->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (begin and closing and end):
        raise ValueError(
            f"the page has no place for {name!r}: <!-- {name}: ... --> and <!-- end of {name} --> are needed"
        )
    return f"{before}{begin}{how}{closing}\n{text}\n{end}{after}"


def write_between_marks(path: Path, name: str, text: str) -> None:
    """The same for a file."""
    path.write_text(replace_between_marks(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def tables_of(item: Item, settings: Settings, *, level: str = "**{}**") -> str:
    """What an item's record says, for a page of the documentation: where it ran, then its tables under their titles."""
    results = in_order(item, read_results(settings.folder(item.name)), settings)
    parts = [f"({head(item, [*results, *item.borrowed(settings)], settings)})"]
    for section in item.sections(results, settings):
        parts.append(level.format(section.title))
        parts += [part for part in (section.text, section.table and section.table.markdown()) if part]
    return "\n\n".join(parts)
