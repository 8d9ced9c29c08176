"""ATC on the token grid: exact within windows, or only between groups that touch. For thousands of tokens, where
clustering all of them at once costs more than attention saves."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from agglo.clustering import cluster
from agglo.grouping import Grouping, Mean
from agglo.methods import ATC, Outcome, View
from agglo.methods.base import require_grid
from agglo.methods.helpers.features import patch_features
from agglo.methods.helpers.per_reduction import at_reduction

OPTIONS = frozenset({"window", "connectivity", "spread"})  # any of them asks for this method


class LocalATC(ATC):
    """Bottom-up clustering within windows of the grid, or of neighbouring groups only.

    window: tokens per side, an int or (rows, columns).
    connectivity: "grid", instead of a window.
    spread: groups over windows: "even", or by "need".
    mean: as in ATC.
    """

    name: ClassVar[str] = "atc"

    def __init__(
        self,
        linkage: str = "average",
        features: str = "keys",
        window: int | tuple[int, int] | None = None,
        connectivity: str | None = None,
        spread: str | None = None,
        mean: Mean = "plain",
    ) -> None:
        super().__init__(linkage, features, mean=mean)
        if (window is None) == (connectivity is None):
            given = "neither" if window is None else "both"
            raise ValueError(f"give window= or connectivity='grid' to cluster on the grid, not {given}")
        if connectivity not in (None, "grid"):
            raise ValueError(f"connectivity={connectivity!r} is not known; accepted: 'grid'")
        sides = window if isinstance(window, tuple) else (window, window)
        if window is not None and (len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in sides)):
            raise ValueError(f"window={window!r} must be a whole number of tokens per side, or two of them")
        self.window, self.connectivity, self.spread = window, connectivity, spread

    def options(self) -> dict[str, Any]:
        local = {"window": self.window, "connectivity": self.connectivity, "spread": self.spread}
        return {"linkage": self.linkage, "features": self.features, **local, "mean": self.mean}

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        features = patch_features(view, at_reduction("features", self.features, view.stage))
        grid = require_grid(self, view.grid, int(features.shape[1]))
        chosen = {"window": self.window, "connectivity": self.connectivity, "spread": self.spread}
        where: dict[str, Any] = {"grid": grid, **{name: value for name, value in chosen.items() if value is not None}}
        linkage = at_reduction("linkage", self.linkage, view.stage)
        labels: Tensor = cluster(features, view.target, linkage, check=False, **where)
        return Outcome(Grouping.of(labels.clamp(max=view.target - 1), view.target), mean=self.mean)
