"""Agglomerative clustering against SciPy, scikit-learn and fastcluster, timed side by side in one run.

From a float32 distance tensor on the CPU to labels. Every contestant gets the same distances. Speed is given as a ratio
to agglo, because only that survives a change of machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from agglo.clustering import cluster
from agglo.clustering.api import LINKAGES
from agglo.clustering.distances import pairwise
from agglo.lab.bench import TimingOptions, conclude, page, smooth_images
from agglo.lab.options import AtLeastOne, option
from agglo.utils.devices import torch_threads
from agglo.utils.machine import machine
from agglo.utils.progress import progress
from agglo.utils.tables import Column, Table
from agglo.utils.timing import in_turns, seconds_per_pass

# How many times as long as agglo SciPy is to take for one large image, on two threads.
GOALS = {("1x4096", "single"): 3.0, ("1x4096", "average"): 6.0, ("1x4096", "complete"): 7.0}

Labels = np.ndarray
Contestant = Callable[[Tensor, int, str], Labels]


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    sizes: Sequence[str] = option(("64x196", "1x4096"), "batch x tokens", metavar="BxN")
    linkage: Sequence[str] = option(LINKAGES, choices=LINKAGES, metavar=None)
    threads: AtLeastOne = option(2, "CPU threads of torch; the peers use one each")


def spatial_tokens(batch: int, n: int, dim: int = 64, seed: int = 0) -> Tensor:
    """Return tokens (B, N, D) that resemble their neighbours on a square grid, as those of an image do."""
    side = round(n**0.5)
    if side * side != n:
        raise ValueError(f"n={n} must be a square number: tokens lie on a square grid")
    fields = smooth_images(batch, dim, side, side, every=4, noise=0.3, seed=seed)
    return fields.flatten(2).transpose(1, 2).contiguous()


def by_scikit_learn(distances: Tensor, k: int, linkage: str) -> Labels:
    """Fit one estimator to image after image, as the released code of the ATC paper does."""
    from sklearn.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage=linkage)
    return np.stack([model.fit(matrix).labels_ for matrix in distances.numpy()])


def _linkage_and_cut(library: str, distances: Tensor, k: int, linkage: str) -> Labels:
    from scipy.cluster.hierarchy import fcluster
    from scipy.spatial.distance import squareform

    grow = import_module(library).linkage
    trees = (grow(squareform(matrix, checks=False), linkage) for matrix in distances.numpy())
    return np.stack([fcluster(tree, k, "maxclust") for tree in trees])


CONTESTANTS: dict[str, Contestant] = {
    "agglo": lambda distances, k, linkage: cluster(distances=distances, k=k, linkage=linkage).numpy(),
    "scikit-learn": by_scikit_learn,
    "scipy": partial(_linkage_and_cut, "scipy.cluster.hierarchy"),
    "fastcluster": partial(_linkage_and_cut, "fastcluster"),
}


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of a call that follows another one: as in a model, caches are warm and threads awake."""
    call(*arguments)
    return seconds_per_pass(partial(call, *arguments))


def _same_partition(one: Labels, two: Labels) -> bool:
    pairs = len(np.unique(np.stack([one, two]), axis=1).T)
    return pairs == len(np.unique(one)) == len(np.unique(two))


def measure(features: Tensor, linkage: str, repeats: int) -> dict[str, Any]:
    """Time all contestants, from the distances of features (B, N, D) to half as many groups as tokens."""
    batch, n, _ = features.shape
    distances = pairwise(features, "cosine")
    k = max(1, n // 2)
    labels = {name: contestant(distances, k, linkage) for name, contestant in CONTESTANTS.items()}  # also warms up
    same = {
        name: float(np.mean([_same_partition(*pair) for pair in zip(labels["agglo"], labels[name], strict=True)]))
        for name in CONTESTANTS
    }
    runs = [partial(_seconds, contestant, distances, k, linkage) for contestant in CONTESTANTS.values()]
    runs += [partial(_seconds, distances.amin, -1), partial(_seconds, cluster, features, k, linkage)]
    *taken, one_pass, from_features = in_turns(runs, lambda run, _: run(), repeats, warm_up=0)
    about = {"tokens": "spatial", "batch": batch, "n": n, "keep_rate": 0.5, "linkage": linkage}
    times = {
        "seconds": dict(zip(CONTESTANTS, taken, strict=True)),
        "one_pass": one_pass,
        "from_features": from_features,
    }
    return {**about, **times, "same_partition": same}


def run(options: Options) -> None:
    """Time all cases, print tables and write the record."""
    sizes, cases = [parse_size(size) for size in options.sizes], []
    with torch_threads(options.threads):
        where = machine()
        with progress(len(sizes) * len(options.linkage), "timed") as advance:
            for batch, n in sizes:
                features = spatial_tokens(batch, n)
                for linkage in options.linkage:
                    cases.append(measure(features, linkage, options.repeats))
                    advance(f"{batch} x {n}, {linkage}")
    record = {"machine": where, "cases": cases}
    conclude(record, describe(record), options.json)


def parse_size(text: str) -> tuple[int, int]:
    batch, _, n = text.partition("x")
    if not (batch.isdigit() and n.isdigit()):
        raise ValueError(f"size {text!r} must be BxN, such as 64x196")
    return int(batch), int(n)


def describe(record: Mapping[str, Any]) -> str:
    peers = [name for name in CONTESTANTS if name != "agglo"]
    columns = [Column(title, left=True) for title in ("tokens", "B x N", "linkage")]
    columns += [
        Column("agglo, ms per image", ".3f"),
        *map(Column, (*peers, "from features", "one pass", "same partition")),
    ]
    rows = []
    for case in record["cases"]:
        own = median(case["seconds"]["agglo"])
        ratios = [f"{median(case['seconds'][name]) / own:.1f}x" for name in peers]
        one_pass = f"{median(case['one_pass']) / own:.3f}x"
        from_features = f"{median(case['from_features']) / own:.2f}x"
        same = ", ".join(f"{case['same_partition'][name]:.0%}" for name in peers)
        size = f"{case['batch']} x {case['n']}"
        goal = GOALS.get((size.replace(" ", ""), case["linkage"]))
        if goal is not None:
            met = median(case["seconds"]["scipy"]) / own >= goal
            ratios[peers.index("scipy")] += f" (goal {goal:g}x{'' if met else ', missed'})"
        about = [case["tokens"], size, case["linkage"]]
        rows.append([*about, own / case["batch"] * 1e3, *ratios, from_features, one_pass, same])
    what = (
        "Peers: how many times as long as agglo they take. From features: how many times as long it takes, making "
        "the distances as well. One pass is `D.amin(-1)`, as a share of agglo's time"
    )
    return page(record, what, Table(columns, rows))
