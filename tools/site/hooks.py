"""What MkDocs is told beyond mkdocs.yml: pages of the repository that do not lie in docs/, and links that leave it.

- ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md stay at the top of the repository and are pages of the site too.
- examples/tour.ipynb is a page, with the outputs that are stored in it.
- A link to any other file of the repository leads to a copy in the site, a source file shown as a page: what was true
  on GitHub is true here, and nothing needs a network. A link to nothing is a warning, which stops a strict build.
- A page that the navigation does not name yet is put at the end of "How to".
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
TOP_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".md": "markdown"}
log = logging.getLogger("mkdocs.hooks.agglo")

_LINK = re.compile(r"(?P<before>\]\(|(?:src|href)=\")(?P<target>[^)#\"\s]+)(?P<rest>[^)\"]*[)\"])")
_NAMED_FENCE = re.compile(r"^([ ]*```python)[ ]+\w.*$", re.MULTILINE)  # names of examples are for the tests
_FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    named = set(_named(config.nav))
    here = {path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md")}
    new = sorted(here - named)
    if new:
        log.info("not in the navigation yet, put at the end of How to: %s", ", ".join(new))
        next(section for section in config.nav if "How to" in section)["How to"].extend(new)
    return config


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        nav = nav.values()
    if not isinstance(nav, str):
        for part in nav:
            yield from _named(part)


def on_files(files: Files, config: Any) -> Files:
    for name in TOP_PAGES:
        files.append(File.generated(config, name, content=_as_if_in_docs((ROOT / name).read_text(encoding="utf-8"))))
    _add_notebook(files, config)
    for page in list(files.documentation_pages()):
        text = page.content_string
        for target in _links(text):
            found = _outside(target, page.src_uri)
            if found is not None and found.is_file():
                _add_copy(files, config, found)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    def redirect(target: str) -> str:
        found = _outside(target, page.file.src_uri)
        if found is None:
            return target
        if not found.is_file():
            log.warning("%s links to %s, which is no file of the repository", page.file.src_uri, target)
            return target
        return posixpath.relpath(_place(found), posixpath.dirname(page.file.src_uri))

    return _NAMED_FENCE.sub(r"\1", _rewritten(markdown, redirect))


def _as_if_in_docs(text: str, folder: str = "") -> str:
    """A page of another folder of the repository with the links that it would have in docs/."""

    def moved(target: str) -> str:
        if "://" in target or target.startswith("mailto:"):
            return target
        return posixpath.relpath(posixpath.normpath(posixpath.join(folder, target)), "docs")

    return _rewritten(text, moved)


def _rewritten(text: str, change: Callable[[str], str]) -> str:
    """The page with its links changed, but for those in code."""
    done, end = [], 0
    for fence in [*_FENCE.finditer(text), None]:
        prose = text[end : fence.start() if fence else len(text)]
        done.append(_LINK.sub(lambda m: f"{m['before']}{change(m['target'])}{m['rest']}", prose))
        if fence:
            done.append(fence.group())
            end = fence.end()
    return "".join(done)


def _links(text: str) -> set[str]:
    found: set[str] = set()

    def note(target: str) -> str:
        found.add(target)
        return target

    _rewritten(text, note)
    return found


def _outside(target: str, page: str) -> Path | None:
    """The file of the repository that a link leaves docs/ for; None for links that stay or lead to another host."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    within = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if within.startswith("docs/") else ROOT / within


def _place(path: Path) -> str:
    """Where a file of the repository lies in the site: top pages and sources are pages, all else is copied."""
    name = path.relative_to(ROOT).as_posix()
    if name in TOP_PAGES:
        return name
    if path == NOTEBOOK:
        return "tour.md"
    return f"source/{name}.md" if path.suffix in LANGUAGES or not path.suffix else f"source/{name}"


def _add_copy(files: Files, config: Any, path: Path) -> None:
    place, name = _place(path), path.relative_to(ROOT).as_posix()
    if files.get_file_from_path(place) is not None:
        return
    if not place.endswith(".md"):
        files.append(File.generated(config, place, abs_src_path=str(path)))
        return
    text = path.read_text(encoding="utf-8").rstrip()
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n"
    content = f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"
    files.append(File.generated(config, place, content=content, inclusion=InclusionLevel.NOT_IN_NAV))


def _add_notebook(files: Files, config: Any) -> None:
    from nbconvert import MarkdownExporter

    text, resources = MarkdownExporter().from_filename(str(NOTEBOOK))
    text = _as_if_in_docs(text, NOTEBOOK.parent.relative_to(ROOT).as_posix())
    for name, data in resources["outputs"].items():
        text = text.replace(f"(../examples/{name})", f"(tour_files/{name})")
        files.append(File.generated(config, f"tour_files/{name}", content=data))
    files.append(File.generated(config, "tour.md", content=text))
