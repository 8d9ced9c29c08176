"""Values of settings that come from files and command lines, checked against the types of a dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from agglo.lab.options import choices

Precision = Literal["no", "bf16", "fp16", "auto"]


def checked(settings: type[Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values with the types of their settings.

    Args:
        settings: The dataclass.
        values: By name.
        source: Where they come from, for messages.

    Raises:
        ValueError: The message names what is not a setting or has another type.
    """
    types, words = get_type_hints(settings), choices(settings)
    found = {}
    for name, value in values.items():
        if name not in types:
            close = difflib.get_close_matches(name, types, n=3)
            hint = f"; close to it: {', '.join(close)}" if close else f"; settings are {', '.join(sorted(types))}"
            raise ValueError(f"{source}: {name!r} is no setting{hint}")
        found[name] = _as_type(name, value, str if name in words else types[name], source)
    return found


def _as_type(name: str, value: Any, accepted: Any, source: str) -> Any:
    kinds = get_args(accepted) if type(None) in get_args(accepted) else (accepted,)
    if type(None) in kinds and (value is None or value == "none"):
        return None
    plain = tuple(get_origin(kind) or kind for kind in kinds)
    if list in plain and isinstance(value, list):
        return [_as_type(name, item, float, source) for item in value]
    if float in plain and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
        raise ValueError(
            f"{source}: {name}={value!r} must be {' or '.join(_WORDS.get(kind, 'none') for kind in plain)}"
        )
    return value


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table", list: "a list"}
