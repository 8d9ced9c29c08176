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
import inspect
import math
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
    """What each setting means, from the text below it in the class."""
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(settings)).body[0]).body
    return {
        item.target.id: text.value.value
        for item, text in pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
