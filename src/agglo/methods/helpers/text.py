"""A method as text for the command line and as a table for JSON and TOML, and back.

atc:linkage=single,features=[keys,tokens,tokens]                    options that are not given are the defaults
{"method": "atc", "linkage": "single", "features": ["keys", "tokens", "tokens"]}
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from agglo.methods.base import Method
from agglo.methods.registry import create, find

_WORDS = {"none": None, "true": True, "false": False, "inf": math.inf, "-inf": -math.inf}


def parse_method(described: str | Mapping[str, Any] | Method) -> Method:
    """The method that a text or a table describes.

    >>> parse_method("atc:linkage=single")
    ATC(linkage='single', features='keys', sizes='counted', importance=None, exponent=0.5, mean='plain')
    >>> parse_method({"method": "random", "seed": 3}) == parse_method("random:seed=3")
    True
    """
    if isinstance(described, Method):
        return described
    if isinstance(described, Mapping):
        return _from_table(described)
    if not isinstance(described, str):
        raise TypeError(f"a method is described by a text or a table, not by {described!r}")
    name, options = split_method_text(described)
    return create(name, **options)


def split_method_text(described: str) -> tuple[str, dict[str, Any]]:
    """The name in a method's text, and the options that are written there.

    >>> split_method_text("atc:linkage=single")
    ('atc', {'linkage': 'single'})
    """
    name, colon, listed = described.partition(":")
    if not name or (colon and not listed):
        raise ValueError(f"{described!r} describes no method; accepted: name, or name:option=value,option=value")
    find(name)
    options: dict[str, Any] = {}
    for item in _items(listed):
        option, equals, value = (part.strip() for part in item.partition("="))
        if not (option and equals and value):
            raise ValueError(f"{item!r} in {described!r} is no option; accepted: option=value, separated by commas")
        if option in options:
            raise ValueError(f"{described!r} gives {option!r} twice")
        options[option] = option_value(value)
    return name, options


def _items(listed: str) -> list[str]:
    """The parts between commas; a comma inside of a list in brackets is the list's."""
    items: list[str] = []
    for piece in listed.split(",") if listed else []:
        value = items[-1].partition("=")[2].strip() if items else ""
        if value.startswith("[") and not value.endswith("]"):
            items[-1] += f",{piece}"
        else:
            items.append(piece)
    return items


def method_text(method: Method) -> str:
    """The text that `parse_method` reads: the name, and the options that are not the defaults.

    >>> method_text(create("atc", linkage="single", features="keys"))
    'atc:linkage=single'
    """
    options = {name: value for name, value in method.options().items() if value != method.defaults()[name]}
    written = ",".join(f"{name}={_word(method, name, value)}" for name, value in options.items())
    return f"{method.name}:{written}" if written else method.name


def method_table(method: Method) -> dict[str, Any]:
    """The table that `parse_method` reads: the name and all options but those that are None by default. TOML has no
    word for None; in a list it is the text "none".

    >>> method_table(create("random", seed=3)), method_table(create("random"))
    ({'method': 'random', 'seed': 3}, {'method': 'random'})
    """
    unsaid = [name for name, value in method.options().items() if value is None and method.defaults()[name] is None]
    said = {name: value for name, value in method.options().items() if name not in unsaid}
    lists = {name: ["none" if e is None else e for e in value] for name, value in said.items() if type(value) is list}
    return {"method": method.name, **said, **lists}


def _from_table(table: Mapping[str, Any]) -> Method:
    options = dict(table)
    name = options.pop("method", None)
    if not isinstance(name, str):
        raise ValueError(f"{dict(table)!r} describes no method; accepted: a table with its name under 'method'")
    return create(name, **options)


def option_value(text: str) -> Any:
    """A number or one of true, false, none and inf if it reads like one, a list of such in brackets, else the text
    itself.

    >>> option_value("0.5"), option_value("[class,none]"), option_value("class")
    (0.5, ['class', None], 'class')
    """
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError(f"{text!r} is a list without an end; accepted: [value,value]")
        entries = [entry.strip() for entry in text[1:-1].split(",")]
        if "" in entries:
            raise ValueError(f"{text!r} has an empty entry; accepted: [value,value]")
        return [option_value(entry) for entry in entries]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float, str)) else text


def option_text(value: Any) -> str | None:
    """The text that `option_value` reads; None if there is none."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str) and value.strip() == value != "" and "," not in value:
        brackets = "[" in value or "]" in value
        return value if not brackets and option_value(value) == value else repr(value)
    if isinstance(value, list) and value:
        entries = [None if isinstance(entry, list) else option_text(entry) for entry in value]
        return f"[{','.join(map(str, entries))}]" if None not in entries else None
    return None


def _word(method: Method, name: str, value: Any) -> str:
    written = option_text(value)
    if written is None:
        raise ValueError(f"{name}={value!r} of {method.name} cannot be written in a text; a table can hold it")
    return written
