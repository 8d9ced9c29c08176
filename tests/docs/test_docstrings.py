"""Docstrings become Markdown without losing a word."""

from __future__ import annotations

import doctest
import re

import pytest

pytest.importorskip("griffe", reason="pip install 'agglo[docs]' brings what reads docstrings")

import agglo
from tools.site import docstrings


def test_the_example() -> None:
    assert doctest.testmod(docstrings) == (0, 1)


def test_lists_words_and_examples_are_told_apart() -> None:
    section = "To tinker with:\n    blocks: where.\n    a, b (atc): two of them,\n        on two lines.\n    any other."
    text = docstrings.markdown(
        f"Reduce.\n\n{section}\n\nModels have their own: see there.\n\nleft: one.\n\n>>> f(1)\n2"
    )
    assert "**To tinker with**\n\n- `blocks`: where.\n- `a`, `b` (atc): two of them,\n  on two lines.\n- any" in text
    assert "\n\nModels have their own: see there.\n\n- `left`: one.\n\n```pycon\n>>> f(1)\n2\n```" in text


@pytest.mark.parametrize("name", [name for name in agglo.__all__ if not name.startswith("__")])
def test_no_word_is_lost(name: str) -> None:
    before = getattr(agglo, name).__doc__
    words = [re.findall(r"\w+", text) for text in (before, docstrings.markdown(before).replace("```pycon", ""))]
    assert words[0] == words[1]
