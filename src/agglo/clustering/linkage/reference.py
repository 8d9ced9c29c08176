"""The definition of agglomerative clustering, with no tricks: the oracle for every other backend.

Every token starts as a group, and the two closest groups merge until nothing is left to do. The linkage defines the
distance of two groups I and J, and so, when I and J become one, the distance of that group to a third group K:

    single     d(I, J) = min  D[i, j] over i in I, j in J    d(IJ, K) = min(d(I, K), d(J, K))
    complete   d(I, J) = max  D[i, j]                        d(IJ, K) = max(d(I, K), d(J, K))
    average    d(I, J) = mean D[i, j]                        d(IJ, K) = (|I| d(I, K) + |J| d(J, K)) / (|I| + |J|)

With a weight w[i] >= 0 per token, all of this acts on the float32 products D[i, j] * max(w[i], w[j]) in place of D. A
merged group is never closer to a third one than the nearer of its parts was, whatever symmetric numbers D holds: what
the other backends rely on holds with weights as without.

Rounding. Distances are float32. Single and complete linkage only compare them. A mean is the float64 quotient of the
sum of the distances, taken in float64, and their number. Such a sum is exact (as long as the distances, as multiples of
one power of two, add up to less than 2**53), so means do not depend on the order in which groups came together. That
holds for cosine distances of up to 16 384 tokens and for small integers; elsewhere means may differ in their sixteenth
digit. A threshold is compared in float32.

Ties. Of several closest pairs the first one merges:
    single              the first pair of tokens (i, j), i < j, that is that close
    average, complete   the first pair of groups, a group standing where its first member stands

Order. Rows of a tree, and the merges that are kept for k groups, go by (height, first group, second group), which is
the order in which they happen here.

Every backend follows these rules: equal distances do not make results depend on the device, on the number of threads,
or on whether labels or a tree were asked for. Only a device without float64 (MPS) sums in float32, and may decide ties
of means otherwise. Only the upper triangle of a distance matrix is read, as in SciPy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_BETWEEN_GROUPS: dict[str, Callable[[np.ndarray], float]] = {"single": np.min, "average": np.mean, "complete": np.max}


def merges_of(distances: np.ndarray, linkage: str) -> list[tuple[int, int, float]]:
    """All N-1 merges of one (N, N) matrix in order: (first member of I, first member of J, d(I, J))."""
    upper = np.triu(distances, 1).astype(np.float64)
    tokens = upper + upper.T
    between = _BETWEEN_GROUPS[linkage]
    groups = {i: [i] for i in range(len(tokens))}  # first member -> all members
    # What ties are decided on: for single linkage the tokens themselves, otherwise the groups.
    candidates = np.where(np.triu(np.ones_like(tokens, dtype=bool), 1), tokens, np.inf)

    merges = []
    while len(groups) > 1:
        i, j = divmod(int(np.argmin(candidates)), len(tokens))
        height = float(candidates[i, j])
        if linkage == "single":
            i, j = (next(first for first, members in groups.items() if token in members) for token in (i, j))
        first, second = min(i, j), max(i, j)
        merges.append((first, second, height))

        if linkage == "single":
            candidates[np.ix_(groups[first], groups[second])] = np.inf
            candidates[np.ix_(groups[second], groups[first])] = np.inf
        groups[first] += groups.pop(second)
        if linkage != "single":
            candidates[second, :] = candidates[:, second] = np.inf
            for other, members in groups.items():
                if other != first:
                    distance = between(tokens[np.ix_(groups[first], members)])
                    candidates[min(first, other), max(first, other)] = distance
    return merges


def labels_after(
    merges: list[tuple[int, int, float]], n_tokens: int, k: int | None, threshold: float | None
) -> list[int]:
    """Group number of every token once k groups are left, or all merges within a threshold are done."""
    if k is not None:
        merges = merges[: n_tokens - k]
    elif threshold is not None:
        merges = [merge for merge in merges if np.float32(merge[2]) <= np.float32(threshold)]
    group_of = list(range(n_tokens))  # first member of each token's group
    for first, second, _ in merges:
        group_of = [first if group == second else group for group in group_of]
    number = {group: i for i, group in enumerate(sorted(set(group_of)))}
    return [number[group] for group in group_of]


def labels(distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) of distances (B, N, N), for k groups per item (B,) or all merges within a threshold."""
    result = torch.empty(distances.shape[:2], dtype=torch.int64)
    for b, matrix in enumerate(distances.cpu().numpy()):
        merges = merges_of(matrix, linkage)
        result[b] = torch.tensor(labels_after(merges, len(matrix), None if k is None else int(k[b]), threshold))
    return result.to(distances.device)


def tree(distances: np.ndarray, linkage: str) -> np.ndarray:
    """The linkage matrix (N-1, 4) of distances (N, N), in SciPy's layout."""
    n_tokens = len(distances)
    node, size, rows = list(range(n_tokens)), [1] * n_tokens, []
    for i, j, height in merges_of(distances, linkage):
        size[i] += size[j]
        rows.append([*sorted((node[i], node[j])), height, size[i]])
        node[i] = n_tokens + len(rows) - 1
    return np.array(rows, dtype=np.float64).reshape(-1, 4)
