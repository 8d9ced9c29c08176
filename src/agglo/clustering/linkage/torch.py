"""The torch backend: merging in rounds with tensor operations alone, on every device torch has.

No loop over images and no copy to the host; once per round the host asks whether any image needs another one.

Average and complete linkage: all pairs of groups that are each other's nearest neighbour merge at once. With reducible
linkages and ties broken as in `linkage/reference.py`, sorting these merges by (distance, first token, second token)
gives the very order of one-at-a-time merging. Spatially smooth tokens take about ten rounds; data built to resist can
take N.

Single linkage: Boruvka's rounds. Every group takes the shortest edge that leaves it, so at most log2(N) rounds find the
minimum spanning tree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from agglo.clustering.distances import weighted
from agglo.clustering.tree import number_by_first_member, precise_dtype

INF = float("inf")


class Merges(NamedTuple):
    """Merges of every image, each (B, N), in any order: the groups of tokens `first` and `second` become one.

    Slots without a merge have an infinite height.
    """

    height: Tensor
    first: Tensor
    second: Tensor

    def sorted(self) -> Merges:
        """Sort them as one-at-a-time merging does: by height, then first, then second token; empty slots last."""
        n = self.height.shape[1]
        order = (self.first * n + self.second).argsort(dim=1)
        order = order.gather(1, self.height.gather(1, order).argsort(dim=1, stable=True))
        return Merges(*(field.gather(1, order) for field in self))


def _positions(batch: int, n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device).expand(batch, n)


def _within(height: Tensor, threshold: float) -> Tensor:
    """Whether finite heights are at most a threshold, compared in float32 as the threshold is."""
    return (height.to(torch.float32) <= threshold) & (height < INF)


def _working_copy(distances: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted symmetric distances. Unchecked NaN and infinities become very far, so that pairs are left to merge."""
    if weights is not None:
        distances = weighted(distances, weights)
    return _symmetric_from_upper(distances.nan_to_num(nan=1e38, posinf=1e38, neginf=-1e38))


def _symmetric_from_upper(matrix: Tensor) -> Tensor:
    """The upper triangle of (B, N, N) in both halves, and infinity on the diagonal."""
    upper = matrix.triu(1)
    full = upper + upper.transpose(1, 2)
    full.diagonal(dim1=1, dim2=2).fill_(INF)
    return full


def _nearest(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest value of every row of (B, N, N) and its first position, each (B, N)."""
    batch, n, _ = matrix.shape
    value = matrix.amin(dim=2)
    position = _positions(batch, n, matrix.device).unsqueeze(1)
    # argmin may return any of several equal positions.
    return value, torch.where(matrix == value.unsqueeze(-1), position, n).amin(dim=2)


# --- average and complete ---------------------------------------------------------------------------------------------


def _join_rows(matrix: Tensor, leads: Tensor, partner: Tensor, average: bool) -> Tensor:
    """Combine the rows that lead a pair (B, N) with those of their partners."""
    other = matrix.gather(1, partner.unsqueeze(-1).expand_as(matrix))
    joined = matrix + other if average else torch.maximum(matrix, other)
    return torch.where(leads.unsqueeze(-1), joined, matrix)


def _certain(merges: Merges, closest: Tensor, nearest: Tensor, neighbour: Tensor) -> Tensor:
    """Count the merges (B,) that come before the closest pair that is left."""
    first = (nearest == closest.unsqueeze(1)).to(torch.uint8).argmax(dim=1, keepdim=True)
    second = neighbour.gather(1, first)
    height = closest.unsqueeze(1)
    tie_before = (merges.first < first) | ((merges.first == first) & (merges.second < second))
    before = (merges.height < height) | ((merges.height == height) & tie_before & (height < INF))
    return before.sum(dim=1)


def _merge_mutual_neighbours(
    distances: Tensor, weights: Tensor | None, average: bool, target: Tensor, threshold: float
) -> Merges:
    """Merges of distances (B, N, N) until the first `target` (B,), or all within the threshold, are among them."""
    batch, n, _ = distances.shape
    here = _positions(batch, n, distances.device)
    matrix = _working_copy(distances, weights)
    if average:  # sums of distances, which are exact: see `reference`
        matrix = matrix.to(precise_dtype(distances.device))
    size = torch.ones(batch, n, dtype=matrix.dtype, device=distances.device)
    merges = Merges(torch.full_like(size, INF), here.clone(), here.clone())
    while True:
        nearest, neighbour = _nearest(matrix / (size.unsqueeze(1) * size.unsqueeze(2)) if average else matrix)
        closest = nearest.amin(dim=1)
        done = _certain(merges, closest, nearest, neighbour) >= target
        active = ~done & _within(closest, threshold)
        if not bool(active.any()):
            return merges

        mutual = (neighbour.gather(1, neighbour) == here) & _within(nearest, threshold) & active.unsqueeze(1)
        leads, leaves = mutual & (here < neighbour), mutual & (here > neighbour)
        # A group leaves once at most, so the merge is noted in the slot of the one that leaves.
        merges = Merges(
            torch.where(leaves, nearest, merges.height),
            torch.where(leaves, neighbour, merges.first),
            merges.second,
        )
        joined_size = size + size.gather(1, neighbour)
        matrix = _join_rows(matrix, leads, neighbour, average)
        matrix = _join_rows(matrix.transpose(1, 2), leads, neighbour, average)
        # Where sums are not exact, rows then columns differs from columns then rows in the last bit: one half decides.
        matrix = _symmetric_from_upper(matrix)
        matrix.masked_fill_(leaves.unsqueeze(1) | leaves.unsqueeze(2), INF)
        size = torch.where(leads, joined_size, size)


# --- single -----------------------------------------------------------------------------------------------------------


def _jump_to_roots(parent: Tensor) -> Tensor:
    """Follow parents (B, N) to the end; every jump doubles the way."""
    for _ in range(max(1, math.ceil(math.log2(parent.shape[1])))):
        parent = parent.gather(1, parent)
    return parent


def _spanning_edges(distances: Tensor, weights: Tensor | None, threshold: float) -> Merges:
    """The edges within the threshold of the minimum spanning trees of distances (B, N, N).

    Edges compare by (distance, first token, second token), which makes the tree unique.
    """
    batch, n, _ = distances.shape
    here = _positions(batch, n, distances.device)
    matrix = _working_copy(distances, weights)
    group = here.clone()
    edges = Merges(torch.full((batch, n), INF, device=distances.device), here.clone(), here.clone())
    while True:
        matrix = matrix.masked_fill(group.unsqueeze(1) == group.unsqueeze(2), INF)
        nearest, neighbour = _nearest(matrix)
        height = torch.full_like(nearest, INF).scatter_reduce(1, group, nearest, "amin")
        grows = _within(height, threshold)
        if not bool(grows.any()):
            return edges

        code = torch.minimum(here, neighbour) * n + torch.maximum(here, neighbour)
        code = torch.where(nearest == height.gather(1, group), code, n * n)
        code = torch.full_like(code, n * n).scatter_reduce(1, group, code, "amin")
        first = torch.where(grows, code // n, here)
        second = torch.where(grows, code % n, here)
        ends = group.gather(1, first), group.gather(1, second)
        parent = torch.where(ends[0] == here, ends[1], ends[0])
        parent = torch.where(grows, parent, here)
        # Two groups may take the same edge: the first of them stays.
        stays = (parent.gather(1, parent) == here) & (here < parent)
        parent = torch.where(stays, here, parent)
        leaves = parent != here
        edges = Merges(
            torch.where(leaves, height, edges.height),
            torch.where(leaves, first, edges.first),
            torch.where(leaves, second, edges.second),
        )
        group = _jump_to_roots(parent).gather(1, group)


def _connected(edges: Merges) -> Tensor:
    """Group ids (B, N) of tokens connected by the edges of finite height."""
    batch, n = edges.height.shape
    here = _positions(batch, n, edges.height.device)
    group = here.clone()
    used = edges.height < INF
    while True:
        one, two = group.gather(1, edges.first), group.gather(1, edges.second)
        smaller = torch.where(used, torch.minimum(one, two), here)
        parent = here.scatter_reduce(1, torch.where(used, torch.maximum(one, two), here), smaller, "amin")
        if bool((parent == here).all()):
            return group
        group = _jump_to_roots(parent).gather(1, group)


# --- answers ----------------------------------------------------------------------------------------------------------


def _sorted_merges(
    distances: Tensor, weights: Tensor | None, linkage: str, target: Tensor, threshold: float = INF
) -> Merges:
    if linkage == "single":
        return _spanning_edges(distances, weights, threshold).sorted()
    return _merge_mutual_neighbours(distances, weights, linkage == "average", target, threshold).sorted()


def labels(
    distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None, weights: Tensor | None = None
) -> Tensor:
    """Labels (B, N) of distances (B, N, N); see `operators`."""
    batch, n, _ = distances.shape
    if batch == 0 or n == 1:
        return torch.zeros(batch, n, dtype=torch.int64, device=distances.device)
    # Compared in float32, as the distances are.
    limit = INF if threshold is None else float(torch.tensor(threshold, dtype=torch.float32))
    target = torch.full((batch,), n - 1, device=distances.device) if k is None else n - k
    merges = _sorted_merges(distances, weights, linkage, target, limit)
    wanted = (_positions(batch, n, distances.device) < target.unsqueeze(1)) & _within(merges.height, limit)
    return number_by_first_member(_connected(merges._replace(height=merges.height.masked_fill(~wanted, INF))))


def tree(distances: Tensor, linkage: str, weights: Tensor | None = None) -> Tensor:
    """Linkage matrices (B, N-1, 4) of distances (B, N, N); see `operators`."""
    batch, n, _ = distances.shape
    device = distances.device
    rows = torch.empty(batch, n - 1, 4, dtype=precise_dtype(device), device=device)
    if rows.numel() == 0:
        return rows
    merges = _sorted_merges(distances, weights, linkage, torch.full((batch,), n - 1, device=device))
    node = _positions(batch, n, device)  # the node each token is in
    for row in range(n - 1):
        one = node.gather(1, merges.first[:, row : row + 1])
        two = node.gather(1, merges.second[:, row : row + 1])
        inside = (node == one) | (node == two)
        node = torch.where(inside, n + row, node)
        low, high = torch.minimum(one, two)[:, 0], torch.maximum(one, two)[:, 0]
        rows[:, row] = torch.stack([low, high, merges.height[:, row], inside.sum(dim=1)], dim=1)
    return rows


def inspect(distances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Measure every item of distances (B, N, N): is it finite, its largest asymmetry and magnitude, each (B,)."""
    flat = distances.flatten(1)
    asymmetry = (distances - distances.transpose(1, 2)).abs().flatten(1).amax(dim=1)
    return flat.isfinite().all(dim=1), asymmetry, flat.abs().amax(dim=1)
