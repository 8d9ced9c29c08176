"""The torch backend: merging in rounds with tensor operations alone, on every device torch has.

No loop over images and no copy to the host; once per round the host asks whether any image needs another one.

Average and complete linkage: all pairs of groups that are each other's nearest neighbour merge at once. With reducible
linkages and ties broken as in `linkage/reference.py`, sorting these merges by (distance, first token, second token)
gives the order of one-at-a-time merging. Single linkage: Boruvka's rounds. Every group takes the shortest edge that
leaves it, so at most log2(N) rounds find the minimum spanning tree.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

INF = float("inf")
# Of every image in any order, each (B, N): height, first and second token, whose groups become one. Slots without a
# merge have an infinite height.
Merges: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _positions(batch: int, n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device).expand(batch, n)


def _within(height: Tensor, threshold: float) -> Tensor:
    """Whether finite heights are at most a threshold, compared in float32 as the threshold is."""
    return (height.to(torch.float32) <= threshold) & (height < INF)


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


def _join_rows(matrix: Tensor, leads: Tensor, partner: Tensor, average: bool) -> Tensor:
    """Combine the rows that lead a pair (B, N) with those of their partners."""
    other = matrix.gather(1, partner.unsqueeze(-1).expand_as(matrix))
    joined = matrix + other if average else torch.maximum(matrix, other)
    return torch.where(leads.unsqueeze(-1), joined, matrix)


def _certain(merges: Merges, closest: Tensor, nearest: Tensor, neighbour: Tensor) -> Tensor:
    """Count the merges (B,) that come before the closest pair that is left."""
    heights, ones, others = merges
    first = (nearest == closest.unsqueeze(1)).to(torch.uint8).argmax(dim=1, keepdim=True)
    second = neighbour.gather(1, first)
    height = closest.unsqueeze(1)
    tie_before = (ones < first) | ((ones == first) & (others < second))
    return ((heights < height) | ((heights == height) & tie_before & (height < INF))).sum(dim=1)


def _merge_mutual_neighbours(distances: Tensor, average: bool, target: Tensor, threshold: float) -> Merges:
    """Merges of distances (B, N, N) until the first `target` (B,), or all within the threshold, are among them."""
    batch, n, _ = distances.shape
    here = _positions(batch, n, distances.device)
    matrix = _symmetric_from_upper(distances)
    if average:  # sums of distances, which are exact: see `reference`
        matrix = matrix.to(torch.float32 if matrix.device.type == "mps" else torch.float64)  # MPS has no float64
    size = torch.ones(batch, n, dtype=matrix.dtype, device=distances.device)
    height, first = torch.full_like(size, INF), here
    while True:
        nearest, neighbour = _nearest(matrix / (size.unsqueeze(1) * size.unsqueeze(2)) if average else matrix)
        closest = nearest.amin(dim=1)
        done = _certain((height, first, here), closest, nearest, neighbour) >= target
        active = ~done & _within(closest, threshold)
        if not bool(active.any()):
            return height, first, here

        mutual = (neighbour.gather(1, neighbour) == here) & _within(nearest, threshold) & active.unsqueeze(1)
        leads, leaves = mutual & (here < neighbour), mutual & (here > neighbour)
        # A group leaves once at most, so the merge is noted in the slot of the one that leaves.
        height, first = torch.where(leaves, nearest, height), torch.where(leaves, neighbour, first)
        joined_size = size + size.gather(1, neighbour)
        matrix = _join_rows(matrix, leads, neighbour, average)
        matrix = _join_rows(matrix.transpose(1, 2), leads, neighbour, average)
        # Where sums are not exact, rows then columns differs from columns then rows in the last bit: one half decides.
        matrix = _symmetric_from_upper(matrix)
        matrix.masked_fill_(leaves.unsqueeze(1) | leaves.unsqueeze(2), INF)
        size = torch.where(leads, joined_size, size)


def _jump_to_roots(parent: Tensor) -> Tensor:
    """Follow parents (B, N) to the end; every jump doubles the way."""
    for _ in range(max(1, math.ceil(math.log2(parent.shape[1])))):
        parent = parent.gather(1, parent)
    return parent


def _spanning_edges(distances: Tensor, threshold: float) -> Merges:
    """The edges within the threshold of the minimum spanning trees of distances (B, N, N).

    Edges compare by (distance, first token, second token), which makes the tree unique.
    """
    batch, n, _ = distances.shape
    here = _positions(batch, n, distances.device)
    matrix = _symmetric_from_upper(distances)
    group = here.clone()
    heights, ones, others = torch.full((batch, n), INF, device=distances.device), here, here
    while True:
        matrix = matrix.masked_fill(group.unsqueeze(1) == group.unsqueeze(2), INF)
        nearest, neighbour = _nearest(matrix)
        height = torch.full_like(nearest, INF).scatter_reduce(1, group, nearest, "amin")
        grows = _within(height, threshold)
        if not bool(grows.any()):
            return heights, ones, others

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
        heights = torch.where(leaves, height, heights)
        ones, others = torch.where(leaves, first, ones), torch.where(leaves, second, others)
        group = _jump_to_roots(parent).gather(1, group)


def _connected(first: Tensor, second: Tensor, used: Tensor) -> Tensor:
    """Group ids (B, N) of tokens connected by the pairs of tokens that are used."""
    here = _positions(first.shape[0], first.shape[1], first.device)
    group = here.clone()
    while True:
        one, two = group.gather(1, first), group.gather(1, second)
        smaller = torch.where(used, torch.minimum(one, two), here)
        parent = here.scatter_reduce(1, torch.where(used, torch.maximum(one, two), here), smaller, "amin")
        if bool((parent == here).all()):
            return group
        group = _jump_to_roots(parent).gather(1, group)


def number_by_first_member(group: Tensor) -> Tensor:
    """Number groups by first member: labels (B, N) from any group ids (B, N) below 2N."""
    batch, n = group.shape
    here = _positions(batch, n, group.device)
    first = torch.full((batch, 2 * n), n, dtype=torch.int64, device=group.device)
    first = first.scatter_reduce(1, group, here, reduce="amin").gather(1, group)
    rank = (first == here).to(torch.int64).cumsum(1) - 1
    return rank.gather(1, first)


def labels(distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) of distances (B, N, N); see `operators`."""
    batch, n, _ = distances.shape
    # Compared in float32, as the distances are.
    limit = INF if threshold is None else float(torch.tensor(threshold, dtype=torch.float32))
    target = torch.full((batch,), n - 1, device=distances.device) if k is None else n - k
    # Unchecked NaN and infinities become very far, so that pairs are left to merge.
    distances = distances.nan_to_num(nan=1e38, posinf=1e38, neginf=-1e38)
    if linkage == "single":
        height, first, second = _spanning_edges(distances, limit)
    else:
        height, first, second = _merge_mutual_neighbours(distances, linkage == "average", target, limit)
    # In the order of one-at-a-time merging: by height, then first, then second token.
    order = (first * n + second).argsort(dim=1)
    order = order.gather(1, height.gather(1, order).argsort(dim=1, stable=True))
    used = (order.argsort(dim=1) < target.unsqueeze(1)) & _within(height, limit)
    return number_by_first_member(_connected(first, second, used))


def cut(tree: Tensor, k: Tensor) -> Tensor:
    """Labels (B, N) after the first N - k merges of linkage matrices (B, N-1, 4) and k (B,)."""
    batch, n_merges, _ = tree.shape
    n = n_merges + 1
    row = _positions(batch, n_merges, tree.device)
    done = row < (n - k).unsqueeze(1)
    parent = _positions(batch, 2 * n - 1, tree.device).contiguous()
    for child in tree[..., :2].to(torch.int64).unbind(2):
        parent = parent.scatter(1, child, torch.where(done, row + n, child))
    return number_by_first_member(_jump_to_roots(parent)[:, :n])
