"""What a visitor reads when something cannot be done: a sentence, never a path of the server."""

from __future__ import annotations

import re
import traceback

from agglo.hosts.swap import UnsupportedModelError
from agglo.playground.page.html import refused, section

# Not in "1/2" or "http://", but in "hf:/home/anna/vit".
_PATH = re.compile(r"(?<![\w/.])(?:[A-Za-z]:\\|/(?!/))[^\s'\",;:)]*[/\\][^\s'\",;:)]*")
_UNKNOWN = "Something went wrong here; the window in which agglo play runs says more."


def sentence(error: BaseException) -> str:
    """In words for a visitor. What nobody foresaw goes to the terminal, where its details belong."""
    if isinstance(error, ModuleNotFoundError):
        return f"This needs {error.name}, which is not installed here; pip install 'agglo[web]' brings all of it."
    if isinstance(error, (ValueError, UnsupportedModelError)):
        return _PATH.sub("…", " ".join(str(error).split()))
    traceback.print_exception(error)
    return _UNKNOWN


def error_html(error: BaseException) -> str:
    return section("error", refused(sentence(error)))
