"""Token-reduction methods, by name. A new file with a class marked `@register` is a new method.

`base` is their interface, and the rules for what they return.
"""

from importlib import import_module
from pkgutil import iter_modules

from agglo.methods.atc import ATC
from agglo.methods.base import Grid, LearnedMethod, Method, ModelShape, Outcome, View
from agglo.methods.registry import MethodInfo, create, import_modules, list_methods, register
from agglo.methods.tome import ToMe

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

__all__ = ["ATC", "Grid", "LearnedMethod", "Method", "MethodInfo", "ModelShape", "Outcome", "ToMe", "View"]
__all__ += ["create", "import_modules", "list_methods", "register"]
