"""The text grammar of commands, records and files: `name:value,key=value`, as in `atc:keep_rate=0.5,linkage=single`.

A value is a number, one of true, false, none and inf, a list in brackets, a text of the same grammar in parentheses
(`schedule=(constant:14,start=3)`), or else a plain word.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_WORDS = {"none": None, "true": True, "false": False, "inf": math.inf, "-inf": -math.inf}
_BRACKETS = {"[": "]", "(": ")"}


class Call(NamedTuple):
    """A parsed text: a name, values without a key, and values by key."""

    name: str
    values: tuple[Any, ...]
    options: dict[str, Any]


def parse_call(text: str) -> Call:
    """Parse `name:value,key=value`.

    Raises:
        ValueError: The text does not follow the grammar, or gives a key twice.

    >>> parse_call("stages:0.9,0.7,blocks=[3,6]")
    Call(name='stages', values=(0.9, 0.7), options={'blocks': [3, 6]})
    """
    name, colon, rest = text.strip().partition(":")
    if not name or (colon and not rest.strip()):
        raise ValueError(f"{text!r} is incomplete; accepted: name, or name:value,key=value")
    values: list[Any] = []
    options: dict[str, Any] = {}
    for item in split_items(rest, text):
        if "=" not in item and not options:
            values.append(parse_value(item))
            continue
        key, value = _parse_option(item)
        if key in options:
            raise ValueError(f"{text!r} gives {key!r} twice")
        options[key] = value
    return Call(name.strip(), tuple(values), options)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse texts `key=value`, such as the words behind a command-line option; the last one of a key counts.

    >>> parse_options(["linkage=single", "exponent=0.5"])
    {'linkage': 'single', 'exponent': 0.5}
    """
    return dict(_parse_option(text) for text in texts)


def _parse_option(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise ValueError(f"{text!r} is not understood; accepted: key=value")
    return key, parse_value(value)


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
        return inner if text[0] == "(" else [parse_value(item) for item in split_items(inner, text)]
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
    if isinstance(value, float) and value.is_integer():
        return repr(value).removesuffix(".0")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_value, value))}]"
    text = str(value)
    for written in (text, f"({text})"):
        if _reads_back(written, text):
            return written
    raise ValueError(f"{value!r} cannot be written in a text; JSON can hold it")


def _reads_back(written: str, text: str) -> bool:
    try:
        return split_items(written, written) == [written] and parse_value(written) == text and "=" not in written[:1]
    except ValueError:
        return False


def split_items(text: str, whole: str) -> list[str]:
    """Split a text at its commas, except those inside brackets and parentheses."""
    items, start, open_brackets = [], 0, []
    for position, character in enumerate(text):
        if character in _BRACKETS:
            open_brackets.append(_BRACKETS[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character == "," and not open_brackets:
            items.append(text[start:position].strip())
            start = position + 1
    items.append(text[start:].strip())
    if open_brackets or (len(items) > 1 and "" in items):
        problem = f"has no closing {open_brackets[-1]!r}" if open_brackets else "has nothing between two commas"
        raise ValueError(f"{whole!r} {problem}")
    return [item for item in items if item]
