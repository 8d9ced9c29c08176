"""Token-reduction methods, one file each, by name. A new file with a class marked `@register` is a new method."""

import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from agglo.methods.atc import ATC
from agglo.methods.base import Grid, LearnedMethod, Method, Outcome, RememberingMethod, Setting, View
from agglo.methods.registry import MethodInfo, create, infos, register
from agglo.methods.tome import ToMe

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")


class _Listing(ModuleType):
    """This package, which is also the function `agglo.methods()`: one name, found by `import` and by a call."""

    def __call__(self) -> list[MethodInfo]:
        """Every method that `agglo.apply` knows by name: what it does, whether it learns, what it needs and can reach.

        >>> import agglo
        >>> [info.kind for info in agglo.methods() if info.name == "atc"]
        ['merges hard']
        """
        return infos()


sys.modules[__name__].__class__ = _Listing

__all__ = [
    "ATC",
    "Grid",
    "LearnedMethod",
    "Method",
    "MethodInfo",
    "Outcome",
    "RememberingMethod",
    "Setting",
    "ToMe",
    "View",
    "create",
    "infos",
    "register",
]
