"""Distance matrices to cluster, and independent answers to compare with."""

from __future__ import annotations

import numpy as np
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from sklearn.cluster import AgglomerativeClustering
from torch import Tensor

LINKAGES = ("single", "average", "complete")
FAST_BACKENDS = ("cpu", "torch")
BACKENDS = ("reference", *FAST_BACKENDS)


def tokens(batch: int, n: int, dim: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(batch, n, dim, generator=torch.Generator().manual_seed(seed))


def distinct_distances(batch: int, n: int, seed: int = 0) -> Tensor:
    """Symmetric (B, N, N) float32 distances without ties."""
    values = torch.stack(
        [torch.randperm(n * n, generator=torch.Generator().manual_seed(seed + b)) for b in range(batch)]
    )
    return symmetric(values.view(batch, n, n).to(torch.float32) / (n * n))


def symmetric(matrix: Tensor) -> Tensor:
    upper = matrix.triu(1)
    return upper + upper.transpose(-1, -2)


def by_first_member(labels: np.ndarray) -> np.ndarray:
    """The same partition, groups numbered by first member."""
    seen: dict[int, int] = {}
    return np.array([seen.setdefault(int(label), len(seen)) for label in labels])


def sklearn_labels(distances: np.ndarray, k: int, linkage: str) -> np.ndarray:
    model = AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage=linkage)
    return by_first_member(model.fit(distances).labels_)


def scipy_tree(distances: np.ndarray, linkage: str) -> np.ndarray:
    return hierarchy.linkage(squareform(distances, checks=False), linkage)


def merge_distance(distances: np.ndarray, one: list[int], two: list[int], linkage: str) -> float:
    between = distances[np.ix_(one, two)]
    return float({"single": np.min, "average": np.mean, "complete": np.max}[linkage](between))


def assert_every_merge_is_a_minimum(tree: np.ndarray, distances: np.ndarray, linkage: str, tolerance: float) -> None:
    """Replay a tree (N-1, 4) on the definition: ties cannot fool this, unlike a comparison of labels."""
    n = len(distances)
    distances = distances.astype(np.float64)
    groups = {i: [i] for i in range(n)}
    between = {
        (a, b): distances[a, b] for a in range(n) for b in range(a + 1, n)
    }  # distance of every pair of groups left
    for row, (one, two, height, size) in enumerate(tree):
        a, b = int(one), int(two)
        assert a < b, "children must be sorted"
        assert between[a, b] <= min(between.values()) + tolerance, f"merge {row} is not the closest pair"
        assert abs(height - between[a, b]) <= tolerance, f"merge {row} has height {height}, not {between[a, b]}"
        groups[n + row] = groups.pop(a) + groups.pop(b)
        assert size == len(groups[n + row])
        between = {pair: d for pair, d in between.items() if a not in pair and b not in pair}
        for other, members in groups.items():
            if other != n + row:
                between[other, n + row] = merge_distance(distances, members, groups[n + row], linkage)
    assert len(groups) == 1
