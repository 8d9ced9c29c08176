"""The definition of agglomerative clustering on a grid of tokens, where only neighbouring groups merge.

Every token starts as a group. An edge joins two groups as soon as a token of one is the left, right,
upper or lower neighbour of a token of the other. The shortest edge is merged until nothing is left to do. When I and J
become one, its edge to a group K that

    only one of them had an edge to   keeps its length
    both had an edge to               gets    single    min(d(I, K), d(J, K))
                                              complete  max(d(I, K), d(J, K))
                                              average   (|I| d(I, K) + |J| d(J, K)) / (|I| + |J|)

This is scikit-learn's AgglomerativeClustering(connectivity=...) exactly. Pairs of tokens that are no neighbours never
count: "complete" is not the largest distance within a group, and "average" depends on the order of the merges.

Rounding and ties. Edges are float32, combined in float64, where an average is never less than the shorter edge. Every
edge has the number of a pair of neighbouring tokens, in the order of (first token, second token); of two edges that
become one the shorter one's number stays, of equally short ones the lower. Of several shortest edges the one with the
lowest number merges (scikit-learn takes any of them). A threshold is compared in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agglo.clustering.distances import grid_edges
from agglo.clustering.linkage.reference import labels_after

Edge = tuple[float, int]  # length, number: what edges are compared by


def joined(one: Edge, two: Edge, size_one: int, size_two: int, linkage: str) -> Edge:
    """The edge that two edges to the same group become."""
    nearer, farther = min(one, two), max(one, two)
    if linkage == "single":
        return nearer
    if linkage == "complete":
        return farther[0], nearer[1]
    mean = (size_one * one[0] + size_two * two[0]) / (size_one + size_two)
    return max(mean, nearer[0]), nearer[1]


def merges_of(first: list[int], second: list[int], lengths: list[float], linkage: str) -> list[tuple[int, int, float]]:
    """All merges in order: (first member of I, first member of J, length of their edge)."""
    n_tokens = max(second, default=0) + 1
    size = dict.fromkeys(range(n_tokens), 1)
    edges: dict[int, dict[int, Edge]] = {token: {} for token in range(n_tokens)}  # group -> neighbouring group -> edge
    for number, (i, j, length) in enumerate(zip(first, second, lengths, strict=True)):
        edges[i][j] = edges[j][i] = (length, number)
    merges = []
    while len(edges) > 1:
        (length, _), i, j = min((edge, i, j) for i in edges for j, edge in edges[i].items() if i < j)
        merges.append((i, j, length))
        del edges[i][j], edges[j][i]
        for other, edge in edges.pop(j).items():
            del edges[other][j]
            if other in edges[i]:
                edge = joined(edges[i][other], edge, size[i], size[j], linkage)
            edges[i][other] = edges[other][i] = edge
        size[i] += size.pop(j)
    return merges


def labels(distances: Tensor, grid: list[int], linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) from edge distances (B, E), for k (B,) groups per item or all merges within a threshold."""
    first, second = (ends.tolist() for ends in grid_edges(grid))
    n_tokens = grid[0] * grid[1]
    result = torch.empty(len(distances), n_tokens, dtype=torch.int64)
    for b, lengths in enumerate(distances.double().tolist()):
        merges = merges_of(first, second, lengths, linkage)
        result[b] = torch.tensor(labels_after(merges, n_tokens, None if k is None else int(k[b]), threshold))
    return result
