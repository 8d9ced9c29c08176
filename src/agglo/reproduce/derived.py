"""What follows from a table of accuracies alone: ranks, and differences to the best prior method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from scipy.stats import rankdata

from agglo.reproduce import printed
from agglo.reproduce.classifiers import HARD, OURS, SOFT
from agglo.reproduce.compare import grouped
from agglo.reproduce.item import Result


class Place(NamedTuple):
    """One column of a table of accuracies."""

    model: str
    data: str
    keep_rate: float


Grid = Mapping[Place, Mapping[str, float]]  # accuracy by method; one that cannot is absent


# Those that ATC is compared with: methods that merge hard; and all that merge.
PRIOR = {False: HARD, True: (*HARD, *SOFT)}
HARD_MERGING = (*HARD, *OURS)


def printed_grid() -> dict[Place, dict[str, float]]:
    """The paper's fine-tuned table."""
    grid: dict[Place, dict[str, float]] = {}
    for model, by_data in printed.table("fine-tuned")["values"].items():
        for data, by_method in by_data.items():
            for method, by_rate in by_method.items():
                if isinstance(by_rate, dict):  # not so for the dense model
                    for rate, number in by_rate.items():
                        if number is not None:
                            grid.setdefault(Place(model, data, float(rate)), {})[method] = number
    return grid


def by_seed(results: Sequence[Result], names: Sequence[str]) -> dict[int, dict[Place, dict[str, float]]]:
    """What was measured, a table per seed; at each place those seeds only that all methods have which were run there.

    names: of the methods that are compared.
    """
    chosen = [r for r in results if r["keep_rate"] is not None and r["method"] in names]
    grids: dict[int, dict[Place, dict[str, float]]] = {}
    for (model, data, rate), here in grouped(chosen, "model", "data", "keep_rate").items():
        place = Place(str(model), str(data), float(str(rate)))
        metric = "mAP" if any("mAP" in result for result in here) else "top1"
        done = [result for result in here if metric in result]
        seeds = [{result["seed"] for result in of} for of in grouped(done, "method").values()]
        for seed in sorted(set.intersection(*seeds)) if seeds else ():
            row = {result["method"]: result[metric] for result in done if result["seed"] == seed}
            grids.setdefault(seed, {})[place] = row
    return grids


def measured_grid(results: Sequence[Result], names: Sequence[str]) -> dict[Place, dict[str, float]]:
    """Means over the seeds that methods have in common."""
    grids = by_seed(results, names)
    places = dict.fromkeys(place for grid in grids.values() for place in grid)
    found: dict[Place, dict[str, float]] = {}
    for place in places:
        rows = [grid[place] for grid in grids.values() if place in grid]
        found[place] = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return found


def among(grid: Grid, names: Sequence[str]) -> dict[Place, dict[str, float]]:
    """The grid with some methods only."""
    return {place: {name: row[name] for name in names if name in row} for place, row in grid.items()}


def ranks(grid: Grid) -> dict[str, dict[Place, float]]:
    """Rank of every method at every place where it has a number, 1 the best; equals share the mean of their ranks."""
    found: dict[str, dict[Place, float]] = {}
    for place, row in grid.items():
        for name, rank in zip(row, rankdata([-number for number in row.values()]), strict=True):
            found.setdefault(name, {})[place] = float(rank)
    return found


def mean_ranks(grid: Grid, keep_rate: float | None = None) -> dict[str, tuple[float, float]]:
    """Mean and deviation of each method's ranks, over all places or those of one keep rate; best first."""
    chosen = {place: row for place, row in grid.items() if keep_rate in (None, place.keep_rate)}
    found = {name: list(of.values()) for name, of in ranks(chosen).items()}
    means = {name: (fmean(values), pstdev(values)) for name, values in found.items()}
    return dict(sorted(means.items(), key=lambda entry: entry[1]))


def differences(grid: Grid, *, soft: bool = False) -> dict[str, dict[float, float]]:
    """How far each linkage of ATC is above the best prior method that merges hard, or hard or soft: the mean over
    models and data sets at each keep rate."""
    prior = PRIOR[soft]
    found: dict[str, dict[float, list[float]]] = {name: {} for name in OURS}
    for place, row in grid.items():
        before = [row[name] for name in prior if name in row]
        for name in OURS:
            if before and name in row:
                found[name].setdefault(place.keep_rate, []).append(row[name] - max(before))
    return {name: {rate: fmean(values) for rate, values in sorted(of.items())} for name, of in found.items()}
