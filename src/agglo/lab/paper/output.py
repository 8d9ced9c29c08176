"""The folder of a study: its record, and the tables in Markdown and LaTeX and the figures that follow from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from agglo.lab.paper.study import Result, Section, Settings, Study
from agglo.utils.files import replacing
from agglo.utils.journal import Journal, key_of
from agglo.utils.machine import machine

RECORD, MARKDOWN, LATEX = "record.json", "tables.md", "tables.tex"
# Which model and images a cell is about, and what must then be equal in all its results: one table is not to mix
# weights or images of the same name.
_SUBJECT = ("training", "part", "model", "data", "seed")
_SOURCES = ("weights", "weights_with_token", "data_fingerprint", "batch_size")


def open_journal(study: Study, settings: Settings, *, writes: bool = True) -> Journal:
    """Open the journal of a study. Of several processes that run the same cells together, one writes."""
    return Journal(
        settings.folder(study.name) / RECORD,
        {"item": study.name, "miniature": settings.miniature, "machine": machine(torch.device(settings.device))},
        same=("item", "miniature"),
        subject=_SUBJECT,
        sources=_SOURCES,
        writes=writes,
    )


def read_results(folder: Path) -> list[Result]:
    """Return all results of a study's folder; none if it has not been run."""
    path = folder / RECORD
    results: list[Result] = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    return results


def in_order(study: Study, results: Sequence[Result], settings: Settings) -> list[Result]:
    """Return the results that a study's tables show: borrowed ones, then its own in the order of its cells.

    What it does not ask for by itself, such as further seeds, comes last.
    """
    positions = {cell.key: position for position, cell in enumerate(study.cells(settings))}
    own = sorted(results, key=lambda result: positions.get(key_of(result.get("cell", {})), len(positions)))
    return [*study.borrow(settings), *own]


def write_output(study: Study, results: Sequence[Result], settings: Settings) -> Path:
    """Write everything that follows from a record into the study's folder, which is returned."""
    folder = settings.folder(study.name)
    folder.mkdir(parents=True, exist_ok=True)
    figures = study.draw(in_order(study, results, settings), study.scale(settings.miniature), settings, folder)
    for name, text in pages_of(study, results, settings, figures).items():
        with replacing(folder / name) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    return folder


def pages_of(
    study: Study, results: Sequence[Result], settings: Settings, figures: Sequence[Path] = ()
) -> dict[str, str]:
    """Return the texts of a study's files by name: the page with its tables and figures, and the tables in LaTeX."""
    results = in_order(study, results, settings)
    sections = study.table(results, study.scale(settings.miniature))
    parts = [f"# {study.name}: {study.shows}", head(study, results, settings), *_parts(sections, "## {}")]
    parts += [f"![{path.stem}]({path.name})" for path in figures]
    tables = [f"% {study.name}: {s.title}\n{s.table.latex()}" for s in sections if s.table is not None]
    return {MARKDOWN: "\n\n".join(parts) + "\n", LATEX: "\n\n".join(tables) + "\n"}


def tables_of(study: Study, settings: Settings) -> str:
    """Return what a study's record says, for a page of the documentation: where it ran, then its tables."""
    results = in_order(study, read_results(settings.folder(study.name)), settings)
    parts = [
        f"({head(study, results, settings)})",
        *_parts(study.table(results, study.scale(settings.miniature)), "**{}**"),
    ]
    return "\n\n".join(parts)


def _parts(sections: Sequence[Section], title: str) -> list[str]:
    texts = [(title.format(s.title), s.text, s.table and s.table.markdown()) for s in sections]
    return [part for of_section in texts for part in of_section if part]


def head(study: Study, results: Sequence[Result], settings: Settings) -> str:
    """Return what was measured, by which command, where and when."""
    command = f"{study.command} {study.name}{' --miniature' if settings.miniature else ''}"
    stands_in = f" {study.stands_in}" if settings.miniature and study.stands_in else ""
    from_print = not results and not study.cells(settings)  # nothing was measured, and nothing had to be
    processors = sorted({result["processor"] for result in results if result.get("processor")})
    dates = sorted({result["date"][:10] for result in results if result.get("date")})
    source = "from the printed numbers alone" if from_print else "not run yet"
    if processors:
        source = f"{' and '.join(processors)}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}"
    return f"{study.about}.{stands_in} `{command}`; {source}."


def replace_between_marks(page: str, name: str, text: str) -> str:
    """Return a page with what stands between `<!-- name: ... -->` and `<!-- end of name -->` replaced.

    >>> replace_between_marks("a <!-- n: make it -->old<!-- end of n --> z", "n", "new")
    'a <!-- n: make it -->\\nnew\\n<!-- end of n --> z'
    """
    before, begin, rest = page.partition(f"<!-- {name}:")
    how, closing, rest = rest.partition("-->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (begin and closing and end):
        raise ValueError(f"the page has no marks <!-- {name}: ... --> and <!-- end of {name} -->")
    return f"{before}{begin}{how}{closing}\n{text}\n{end}{after}"
