"""Pages and files of the repository that do not lie in docs/, for MkDocs.

- ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site; so is examples/tour.ipynb, with its outputs.
- Any other file of the repository that a page links to is copied into the site, so that links work without a network. A
  link to nothing is a warning, which stops a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
TOP_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
NOTEBOOK, TOUR = "examples/tour.ipynb", "tour.md"
log = logging.getLogger("mkdocs.hooks.agglo")

_LINK = re.compile(r"(?P<before>\]\(|(?:src|href)=\")(?P<target>[^)#\"\s]+)(?P<rest>[^)\"]*[)\"])")
_NAMED_FENCE = re.compile(r"^([ ]*```python)[ ]+\w.*$", re.MULTILINE)  # names of examples are for the tests
_FENCE = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    for name in TOP_PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_moved_to_docs(text, "")))
    _add_notebook(files, config)
    for page in list(files.documentation_pages()):

        def copy(target: str, page: str = page.src_uri) -> str:
            path = _outside(target, page)
            if path and path.is_file() and files.get_file_from_path(_site_path(path)) is None:
                files.append(File.generated(config, _site_path(path), abs_src_path=str(path)))
            return target

        _with_links(page.content_string, copy)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    def redirect(target: str) -> str:
        path = _outside(target, page.file.src_uri)
        if path is None:
            return target
        if not path.is_file():
            log.warning("%s links to %s, which is no file of the repository", page.file.src_uri, target)
            return target
        return posixpath.relpath(_site_path(path), posixpath.dirname(page.file.src_uri))

    return _NAMED_FENCE.sub(r"\1", _with_links(markdown, redirect))


def _with_links(text: str, change: Callable[[str], str]) -> str:
    """A page with the target of every link changed, but for those in code."""
    fences = [match.span() for match in _FENCE.finditer(text)]

    def replaced(match: re.Match[str]) -> str:
        if any(begin <= match.start() < end for begin, end in fences):
            return match.group()
        return f"{match['before']}{change(match['target'])}{match['rest']}"

    return _LINK.sub(replaced, text)


def _moved_to_docs(text: str, folder: str) -> str:
    """A page of another folder of the repository with the links that it would have in docs/."""

    def moved(target: str) -> str:
        if "://" in target or target.startswith("mailto:"):
            return target
        return posixpath.relpath(posixpath.join(folder, target), "docs")

    return _with_links(text, moved)


def _outside(target: str, page: str) -> Path | None:
    """The file of the repository that a link leaves docs/ for; None for links that stay or lead to another host."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    within = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if within.startswith("docs/") else ROOT / within


def _site_path(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if name == NOTEBOOK:
        return TOUR
    return name if name in TOP_PAGES else f"source/{name}"


def _add_notebook(files: Files, config: Any) -> None:
    from nbconvert import MarkdownExporter

    text, resources = MarkdownExporter().from_filename(str(ROOT / NOTEBOOK))
    text = _moved_to_docs(text, posixpath.dirname(NOTEBOOK))
    for name, data in resources["outputs"].items():
        text = text.replace(f"(../examples/{name})", f"(tour_files/{name})")
        files.append(File.generated(config, f"tour_files/{name}", content=data))
    files.append(File.generated(config, TOUR, content=text))
