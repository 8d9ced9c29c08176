"""The text grammar of commands, records and files: `name:value,key=value`, as in `atc:keep_rate=0.5,linkage=single`.

A value is a number, one of true, false, none and inf, a list in brackets, a text of the same grammar in parentheses
(`schedule=(constant:14,start=3)`), or else a plain word.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = {"none": None, "true": True, "false": False, "inf": math.inf, "-inf": -math.inf}
_BRACKETS = {"[": "]", "(": ")"}


def parse_call(text: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Parse `name:value,key=value` into the name, the values without a key, and the others by key.

    Raises:
        ValueError: The text does not follow the grammar, or gives a key twice.

    >>> parse_call("stages:0.9,0.7,blocks=[3,6]")
    ('stages', (0.9, 0.7), {'blocks': [3, 6]})
    """
    name, colon, rest = text.strip().partition(":")
    if not name or (colon and not rest.strip()):
        raise ValueError(f"{text!r} is incomplete; accepted: name, or name:value,key=value")
    items = _split(rest, text)
    first = next((index for index, item in enumerate(items) if "=" in item), len(items))
    options = parse_options(items[first:])
    if len(options) < len(items) - first:
        keys = [item.partition("=")[0].strip() for item in items[first:]]
        raise ValueError(f"{text!r} gives {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return name.strip(), tuple(map(parse_value, items[:first])), options


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse texts `key=value`, such as the words behind a command-line option; the last one of a key counts.

    >>> parse_options(["linkage=single", "exponent=0.5"])
    {'linkage': 'single', 'exponent': 0.5}
    """
    options = {}
    for text in texts:
        key, _, value = (part.strip() for part in text.partition("="))
        if not (key and value):
            raise ValueError(f"{text!r} is not understood; accepted: key=value")
        options[key] = parse_value(value)
    return options


def format_call(name: str, values: Sequence[Any] = (), options: Mapping[str, Any] | None = None) -> str:
    """Write the text that `parse_call` reads.

    >>> format_call("stages", (0.9, 0.7), {"blocks": (3, 6), "nested": True})
    'stages:0.9,0.7,blocks=[3,6],nested=true'
    """
    written = [format_value(value) for value in values]
    written += [f"{key}={format_value(value)}" for key, value in (options or {}).items()]
    return f"{name}:{','.join(written)}" if written else name


def parse_value(text: str) -> Any:
    """Parse one value; what is neither a number, a known word nor in brackets is the text itself.

    >>> parse_value("0.5"), parse_value("[class,none]"), parse_value("(constant:14)"), parse_value("class")
    (0.5, ['class', None], 'constant:14', 'class')
    """
    text = text.strip()
    if text[:1] in _BRACKETS:
        if not text.endswith(_BRACKETS[text[0]]):
            raise ValueError(f"{text!r} has no closing {_BRACKETS[text[0]]!r}")
        inner = text[1:-1].strip()
        return inner if text[0] == "(" else [parse_value(item) for item in _split(inner, text)]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float, str)) else text


def format_value(value: Any) -> str:
    """Write one value; schedules and other values with a text of their own stand in parentheses.

    Raises:
        ValueError: The value has no text that reads back as the same value.
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value).removesuffix(".0")
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_value, value))}]"
    text = str(value)
    for written in (text, f"({text})"):
        try:
            if _split(written, written) == [written] and parse_value(written) == text and written[:1] != "=":
                return written
        except ValueError:
            continue
    raise ValueError(f"{value!r} cannot be written in a text; JSON can hold it")


def _split(text: str, whole: str) -> list[str]:
    """Split a text at its commas, except those inside brackets and parentheses."""
    items, closing = [""], ""
    for character in text:
        if character == "," and not closing:
            items.append("")
            continue
        items[-1] += character
        if character in _BRACKETS:
            closing = _BRACKETS[character] + closing
        elif character == closing[:1]:
            closing = closing[1:]
    items = [item.strip() for item in items]
    if closing or (len(items) > 1 and "" in items):
        raise ValueError(f"{whole!r} has {f'no closing {closing[0]!r}' if closing else 'nothing between two commas'}")
    return [item for item in items if item]
