"""Towers whose loop over layers lies in a module of its own, which is handed tokens and never sees the picture.

Few methods ask where patches are. For these, the tower gets another class too: it tells the loop how many rows and
columns of patches the picture has, which at another size than the tower's own cannot be told from their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from agglo.hosts.swap import ReducedModule, Setting
from agglo.hosts.vit.reading import ReducedReader, StandIn
from agglo.hosts.vit.transformers_loop import GRID, INSTALLED, grid_of_pixels, install_hooks, standing_for


@dataclass(frozen=True)
class Sight(Setting):
    """loop: the name of the module with the loop over layers in the tower."""

    loop: str


class SeeingTower(ReducedReader):
    """The override of a tower's `forward`, under the signature of the original."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "agglo_original" in vars(cls):  # not for classes that others make of this one
            cls.forward = _seeing(cls.agglo_original)  # type: ignore[method-assign]


def _seeing(original: type[Any]) -> Callable[..., Any]:
    standing = standing_for(original)

    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        sight = getattr(self, "agglo_applied", None)
        grid = grid_of_pixels(self, args, kwargs)
        if sight is None or grid is None:  # removed after Python had looked up this function; or no picture is given
            return original.forward(self, *args, **kwargs)
        loop = getattr(self, sight.loop)
        if not isinstance(loop, ReducedModule):
            return original.forward(self, *args, **kwargs)
        install_hooks(self, kwargs)
        instead = {sight.loop: _Told(loop, grid=grid), INSTALLED: True}
        return original.forward(standing(self, **instead), *args, **kwargs)

    return forward


class _Told(StandIn):
    """The loop's module, called with the grid besides."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs, **{GRID: self.grid})
