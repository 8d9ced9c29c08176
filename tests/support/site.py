"""A built site as the tests read it: what its pages load, where their links lead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
_LOADED_BY_CSS = re.compile(r"(?:@import\s+|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class _Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.loads.append(found.get("href", ""))
        if tag in LOADING and found.get(LOADING[tag]):
            self.loads.append(found[LOADING[tag]])
        self.loads += _LOADED_BY_CSS.findall(found.get("style", ""))


def foreign_loads(site: Path) -> Iterator[str]:
    """What a browser would fetch from another host to show a page, as "file: address"."""
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        inline = [
            load
            for style in re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
            for load in _LOADED_BY_CSS.findall(style)
        ]
        for address in [*_Reader(text).loads, *inline]:
            if urlsplit(address).netloc:
                yield f"{page.relative_to(site)}: {address}"
    for sheet in sorted(site.rglob("*.css")):
        for address in _LOADED_BY_CSS.findall(sheet.read_text(encoding="utf-8")):
            yield f"{sheet.relative_to(site)}: {address}"


def broken_links(site: Path) -> Iterator[str]:
    """Links and loads within the site that lead to no file, or to no place in one, as "file: address"."""
    pages = {page.resolve(): _Reader(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    for page, read in pages.items():
        if page.name == "404.html":  # shown at any address, so its links are absolute
            continue
        for address in [*read.links, *read.loads]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            there = target.is_file() and (not anchor or target not in pages or anchor in pages[target].ids)
            if not there:
                yield f"{page.relative_to(site.resolve())}: {address}"
