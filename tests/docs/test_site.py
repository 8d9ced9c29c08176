"""The site builds without a warning, its links lead somewhere, and it can be read without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, all_pages
from tests.support.site import broken_links, foreign_loads


def test_the_site(tmp_path: Path) -> None:
    """One build for all that is asked of it, since it takes some seconds."""
    pytest.importorskip("mkdocs", reason="pip install 'agglo[docs]' brings what builds the site")
    pytest.importorskip("mkdocstrings", reason="pip install 'agglo[docs]' brings what builds the site")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr[-3000:]
    assert not list(broken_links(site))
    assert not list(foreign_loads(site))
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page.name
    api = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="agglo.apply"' in api and "&gt;&gt;&gt;" in api, "docstrings with their examples"
    assert "search_index.js" in {path.name for path in (site / "search").iterdir()}, "search without a server"


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.name)
def test_links_between_files_as_github_shows_them(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for one, other in re.findall(r"\]\(([^)\s#]+)[^)]*\)|src=\"([^\"]+)\"", text):
        address = one or other
        if "://" not in address and not address.startswith("mailto:"):
            assert (page.parent / address).exists(), f"{page.name}: {address}"
