"""Running a module reduced by giving it another class: the original's, with overrides in front.

Overrides sit on a subclass swapped into the module (`module.__class__`), not on the instance, so that copies, pickles
and data-parallel replicas run themselves and not the original. State of a forward pass lives in its local variables.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import nn

from agglo.methods import Method
from agglo.plan import Plan


class UnsupportedModelError(TypeError):
    """The model is none that agglo knows how to reduce."""


class ReducedModule:
    """Base of the mixins: attributes of an applied module, and how it is copied and pickled."""

    agglo_original: ClassVar[type[nn.Module]]
    agglo_mixin: ClassVar[type[ReducedModule]]
    agglo_plan: Plan
    agglo_method: Method
    agglo_trace: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return (_blank, (self.agglo_mixin, self.agglo_original), *state)


_reduced_classes: dict[tuple[type[ReducedModule], type[nn.Module]], type[nn.Module]] = {}


def reduced_class(mixin: type[ReducedModule], original: type[nn.Module]) -> type[nn.Module]:
    """The original class with the mixin in front, under the original's name: libraries look at class names."""
    if (mixin, original) not in _reduced_classes:
        # setdefault, so that threads that come here together leave with the same class
        _reduced_classes.setdefault((mixin, original), _make_reduced_class(mixin, original))
    return _reduced_classes[mixin, original]


def _make_reduced_class(mixin: type[ReducedModule], original: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (mixin, original), {**names, "agglo_original": original, "agglo_mixin": mixin})


def _blank(mixin: type[ReducedModule], original: type[nn.Module]) -> nn.Module:
    """An empty instance for copy and pickle to fill."""
    cls = reduced_class(mixin, original)
    return cls.__new__(cls)
