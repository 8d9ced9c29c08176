"""Methods by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from agglo.methods.base import Kind, Method, RememberingMethod

T = TypeVar("T", bound=type[Method])

_METHODS: dict[str, type[Method]] = {}
_CATCH_ALL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class MethodInfo:
    """A method in words: what `agglo.methods()` lists.

    learns: whether it has parameters of its own to train.
    kind: whether it prunes tokens, lets them skip blocks and come back, or merges them, each into one group (hard) or
        into several (soft).
    reach: the keep rates it can reach at a stage.
    options: the keyword arguments it takes.
    """

    name: str
    description: str
    kind: Kind
    learns: bool
    needs_class_attention: bool
    reach: str
    reference: str
    options: tuple[str, ...]


def register(method: T) -> T:
    """Make a method known by its name; usable as a class decorator."""
    if not (inspect.isclass(method) and issubclass(method, Method)):
        raise TypeError(f"agglo.register takes a subclass of agglo.Method, got {method!r}")
    if not isinstance(getattr(method, "name", None), str):
        raise ValueError(f"{method.__name__} needs a name to be found by: name = {method.__name__.lower()!r}")
    known = _METHODS.get(method.name)
    # The same class again is a notebook's cell that ran twice.
    if known is not None and (known.__module__, known.__qualname__) != (method.__module__, method.__qualname__):
        raise ValueError(f"method name {method.name!r} is taken by {known.__module__}.{known.__qualname__}")
    _METHODS[method.name] = method
    return method


def create(method: str | Method, **options: Any) -> Method:
    """A method from its name and options, or the instance given."""
    if isinstance(method, Method):
        if options:
            raise ValueError(f"options {sorted(options)} go with a method's name, not with the instance {method!r}")
        return method
    if method not in _METHODS:
        raise ValueError(f"method={method!r} is not known; accepted: {', '.join(map(repr, sorted(_METHODS)))}")
    accepted = _options_of(_METHODS[method])
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(f"method {method!r} has no option {unknown[0]!r}; accepted: {', '.join(accepted) or 'none'}")
    return _METHODS[method](**options)


def infos() -> list[MethodInfo]:
    """Every known method, by name.

    >>> [info.name for info in infos() if info.name in ("atc", "tome")]
    ['atc', 'tome']
    """
    return [_info(_METHODS[name]) for name in sorted(_METHODS)]


def _info(method: type[Method]) -> MethodInfo:
    return MethodInfo(
        name=method.name,
        description=" ".join((inspect.getdoc(method) or "").split()).split(". ")[0].rstrip("."),
        kind=method.kind,
        learns=issubclass(method, nn.Module),
        needs_class_attention=method.needs_class_attention or issubclass(method, RememberingMethod),
        reach=method.reach,
        reference=method.reference,
        options=_options_of(method),
    )


def _options_of(method: type[Method]) -> tuple[str, ...]:
    parameters = inspect.signature(method).parameters.items()
    return tuple(name for name, parameter in parameters if parameter.kind not in _CATCH_ALL)
