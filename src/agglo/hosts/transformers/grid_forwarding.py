"""Towers whose loop over layers lies in a module of its own, which is given tokens and never sees the image.

Few methods ask where patches are. For these, the tower gets another class too: it passes on to the loop how many rows
and columns of patches the image has, which at another size than the tower's own cannot be told from their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from agglo.hosts.common.readers import ReducedReader
from agglo.hosts.common.swap import ReducedModule, Setting, StandIn
from agglo.hosts.transformers.loop import GRID, INSTALLED, grid_of_pixels, install_hooks, standing_for


@dataclass(frozen=True)
class GridForwarding(Setting):
    """loop: the name of the module with the loop over layers in the tower."""

    loop: str


class GridForwardingTower(ReducedReader):
    """The override of a tower's `forward`, under the signature of the original."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "agglo_original" in vars(cls):  # not for classes that others make of this one
            cls.forward = _forwarding(cls.agglo_original)  # type: ignore[method-assign]


def _forwarding(original: type[Any]) -> Callable[..., Any]:
    standing = standing_for(original)

    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        applied = getattr(self, "agglo_applied", None)
        grid = grid_of_pixels(self, args, kwargs)
        # The reduction was removed after Python had looked up this function, or no image is given.
        if applied is None or grid is None:
            return original.forward(self, *args, **kwargs)
        loop = getattr(self, applied.loop)
        if not isinstance(loop, ReducedModule):
            return original.forward(self, *args, **kwargs)
        install_hooks(self, kwargs)
        instead = {applied.loop: _LoopWithGrid(loop, grid=grid), INSTALLED: True}
        return original.forward(standing(self, **instead), *args, **kwargs)

    return forward


class _LoopWithGrid(StandIn):
    """The loop's module, called with the grid besides."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs, **{GRID: self.grid})
