"""Methods by name: those of this package, and those of modules that a user imports."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from agglo.checks import choice
from agglo.methods.base import Kind, Method

T = TypeVar("T", bound=type[Method])

_METHODS: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class MethodInfo:
    """The description of a method, as `agglo.list_methods()` lists it.

    kind: whether it prunes tokens, lets them skip blocks and come back, or merges them, each into one group (hard) or
        into several (soft).
    learns: whether it has parameters to train.
    reach: the keep rates it can reach at a stage.

    >>> atc = next(info for info in agglo.list_methods() if info.name == "atc")
    >>> atc.kind, atc.learns, atc.options[:2]
    ('merges hard', False, ('linkage', 'features'))
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
    """Make a method known by its name; usable as a class decorator.

    >>> @agglo.register
    ... class First(agglo.Method):
    ...     "The first patches stay, in reading order."
    ...
    ...     name = "first"
    ...
    ...     def reduce(self, view):
    ...         kept = torch.arange(view.target).expand(len(view.tokens), -1)
    ...         return agglo.methods.Outcome(view.keep(kept))
    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), "first", keep_rate=0.5)
    """
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


def find(name: str) -> type[Method]:
    """Return the class of that name; ValueError that lists the known ones if there is none."""
    return _METHODS[choice("method", name, sorted(_METHODS))]


def create(method: str, **options: Any) -> Method:
    """Create a method from its name and options."""
    found = find(method)
    for name in options:
        choice(f"option of method {method!r}", name, found.defaults())
    return found(**options)


def list_methods() -> list[MethodInfo]:
    """List every method that `agglo.apply` knows by name, but for those that are for diffusion models alone.

    >>> [info.kind for info in list_methods() if info.name == "atc"]
    ['merges hard']
    """
    return [
        MethodInfo(
            name,
            description=" ".join((inspect.getdoc(method) or "").split()).split(". ")[0].rstrip("."),
            kind=method.kind,
            learns=issubclass(method, nn.Module),
            needs_class_attention=method.needs_class_attention or method.remembers,
            reach=method.reach,
            reference=method.reference,
            options=tuple(method.defaults()),
        )
        for name, method in sorted(_METHODS.items())
        if method.listed and not method.for_diffusion
    ]


def import_modules(modules: Iterable[str]) -> None:
    """Import modules by name, also from the working directory, for the methods, hosts and data sets they register.

    Raises:
        ValueError: A module cannot be imported.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        # A command's path does not hold the directory it was started in. Last, so that nothing there hides a library,
        # and for good, so that processes started later find the module too.
        sys.path.append(os.getcwd())
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # a user's module may raise anything
            raise ValueError(f"module {module!r} cannot be imported: {type(error).__name__}: {error}") from error
