"""Token-reduction methods, one file each, by name."""

from __future__ import annotations

import inspect
from typing import Any

from agglo.methods.atc import ATC
from agglo.methods.base import Method, Outcome, View
from agglo.methods.tome import ToMe

__all__ = ["ATC", "Method", "Outcome", "ToMe", "View", "create", "register"]

_METHODS: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its name; usable as a class decorator."""
    _METHODS[method.name] = method
    return method


register(ATC)
register(ToMe)


def create(method: str | Method, **options: Any) -> Method:
    """A method from its name and options, or the instance given."""
    if isinstance(method, Method):
        if options:
            raise ValueError(f"options {sorted(options)} go with a method's name, not with the instance {method!r}")
        return method
    if method not in _METHODS:
        raise ValueError(f"method={method!r} is not known; accepted: {', '.join(map(repr, sorted(_METHODS)))}")
    accepted = list(inspect.signature(_METHODS[method]).parameters)
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(f"method {method!r} has no option {unknown[0]!r}; accepted: {', '.join(accepted) or 'none'}")
    return _METHODS[method](**options)
