"""Settings of a run as a flat dataclass: numbers with limits in their types, words from a list, a text below each.

@dataclass(frozen=True)
class MySettings:
    epochs: AtLeastOne = 30
    \"\"\"passes over the training images\"\"\"

    def __post_init__(self) -> None:
        require_limits(self)
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

# Numbers with the least and the most that they may be.
AtLeastOne = Annotated[int, (1, math.inf)]
Whole = Annotated[int, (0, math.inf)]
Amount = Annotated[float, (0, math.inf)]
Share = Annotated[float, (0, 1)]
Precision = Literal["no", "bf16", "fp16", "auto"]


def choices(settings: type[Any]) -> dict[str, tuple[str, ...]]:
    """By setting: the words it may be, where it is one of a few."""
    return {name: get_args(hint) for name, hint in get_type_hints(settings).items() if get_origin(hint) is Literal}


def _limits(settings: type[Any]) -> dict[str, tuple[float, float]]:
    hints = get_type_hints(settings, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def require_limits(settings: Any) -> None:
    """ValueError for the first value that lies outside of the limits of its type."""
    for name, (least, most) in _limits(type(settings)).items():
        if not least <= getattr(settings, name) <= most:
            accepted = f"in {least} to {most}" if most < math.inf else f"at least {least}"
            raise ValueError(f"{name}={getattr(settings, name)!r} must be {accepted}")
    for name, words in choices(type(settings)).items():
        if getattr(settings, name) not in words:
            raise ValueError(f"{name}={getattr(settings, name)!r} is not one of {', '.join(words)}")


def explanations(settings: type[Any]) -> dict[str, str]:
    """What each setting means, from the text below it in the class, or in a class that it builds on."""
    bodies = [
        cast(ast.ClassDef, ast.parse(inspect.getsource(each)).body[0]).body
        for each in reversed(settings.__mro__)  # a class goes before those that it builds on
        if is_dataclass(each)
    ]
    return {
        item.target.id: text.value.value
        for body in bodies
        for item, text in pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def checked(settings: type[Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values with their right types; ValueError names what is no setting or of another type.

    source: where they come from, for the message.
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
        return [_number(name, item, source) for item in value]
    if float in plain and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
        wanted = " or ".join(_WORDS[kind] for kind in plain)
        raise ValueError(f"{source}: {name}={value!r} must be {wanted}")
    return value


def _number(name: str, value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{source}: {name} holds {value!r}, which must be a number")
    return float(value)


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table",
    list: "a list of numbers",
    type(None): "none",
}
