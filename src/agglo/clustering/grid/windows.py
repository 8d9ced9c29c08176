"""Clustering within windows of a grid of tokens: many small clusterings in place of a large one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from agglo.clustering.distances import pairwise, weighted
from agglo.clustering.linkage.operators import Request
from agglo.clustering.tree import cut, number_by_first_member

if TYPE_CHECKING:
    from types import ModuleType


class Windows(NamedTuple):
    """Windows of the same shape: their numbers among all windows, and which tokens (W, T) they hold."""

    number: list[int]
    tokens: Tensor


def windows_of(height: int, width: int, window: tuple[int, int]) -> list[Windows]:
    """Return the windows of a grid by shape, at most four; those at the right and lower edge may be smaller."""
    token = torch.arange(height * width).view(height, width)
    by_shape: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}
    rows = token.split(window[0])
    for r, row in enumerate(rows):
        columns = row.split(window[1], dim=1)
        for c, block in enumerate(columns):
            numbers, blocks = by_shape.setdefault(tuple(block.shape), ([], []))
            numbers.append(r * len(columns) + c)
            blocks.append(block.flatten())
    return [Windows(numbers, torch.stack(blocks)) for numbers, blocks in by_shape.values()]


def proportional(k: int, sizes: list[int]) -> list[int]:
    """Share k groups out to windows of these sizes: at least one each, otherwise in proportion by largest remainder.

    >>> proportional(10, [16, 16, 8])
    [4, 4, 2]
    >>> proportional(4, [100, 100, 1])
    [2, 1, 1]
    """
    total = sum(sizes)
    counts = [max(1, k * size // total) for size in sizes]
    # How much less than its share a window has got, in units of 1 / total: integers, so that nothing is rounded.
    short = [k * size - count * total for size, count in zip(sizes, counts, strict=True)]
    while sum(counts) < k:
        neediest = max((w for w in range(len(sizes)) if counts[w] < sizes[w]), key=lambda w: (short[w], -w))
        counts[neediest] += 1
        short[neediest] -= total
    while sum(counts) > k:
        richest = min((w for w in range(len(sizes)) if counts[w] > 1), key=lambda w: (short[w], -w))
        counts[richest] -= 1
        short[richest] += total
    return counts


def by_need(heights: list[Tensor], windows: list[Windows], n_merges: int) -> list[Tensor]:
    """Count the merges of every window among the first n_merges of all windows in the order of height.

    Args:
        heights: of every shape (B, W, T-1), ascending. Of equal heights the first window's merge comes first.
        windows: of every shape.
        n_merges: how many merges are made in all.

    Returns:
        Counts (B, W) for every shape.
    """
    number = torch.cat([torch.tensor(group.number).repeat_interleave(group.tokens.shape[1] - 1) for group in windows])
    number = number.to(heights[0].device)
    height = torch.cat([part.flatten(1) for part in heights], dim=1)
    order = number.argsort(stable=True)
    order = order[height[:, order].argsort(dim=1, stable=True)]  # by height, then window, then row of its tree
    chosen = torch.zeros_like(height, dtype=torch.int64).scatter(1, order[:, :n_merges], 1)
    parts = chosen.split([part.shape[1] * part.shape[2] for part in heights], dim=1)
    return [part.view(shape.shape).sum(dim=2) for part, shape in zip(parts, heights, strict=True)]


def _distances_within(request: Request, tokens: Tensor) -> Tensor:
    """Weighted float32 distances (B * W, T, T) within windows of tokens (W, T)."""
    data, weights = request.data, request.weights
    if request.metric == "precomputed":
        distances = data[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].to(torch.float32).flatten(0, 1).contiguous()
    else:
        distances = pairwise(data[:, tokens].flatten(0, 1), request.metric)
    return distances if weights is None else weighted(distances, weights[:, tokens].flatten(0, 1))


def labels(
    request: Request, grid: tuple[int, int], window: tuple[int, int], spread: str, backend: ModuleType
) -> Tensor:
    """Labels (B, N) for k groups in all windows of a grid together, or for the merges within a threshold.

    Args:
        request: what to cluster, with k or a threshold.
        grid: (height, width) of the tokens.
        window: (height, width) of a window.
        spread: "even" or "need", for k groups.
        backend: the module that clusters windows; see `dispatch`.
    """
    windows = windows_of(*grid, window)
    batch, device, k, linkage = len(request.data), request.data.device, request.k, request.linkage
    n_tokens = grid[0] * grid[1]
    sizes = {number: group.tokens.shape[1] for group in windows for number in group.number}
    if k is not None and spread == "even":
        counts = proportional(k, [sizes[number] for number in sorted(sizes)])
    elif k is not None:
        trees = [backend.tree(_distances_within(request, group.tokens.to(device)), linkage) for group in windows]
        heights = [
            tree[..., 2].reshape(batch, len(group.number), group.tokens.shape[1] - 1)
            for tree, group in zip(trees, windows, strict=True)
        ]
        merges = by_need(heights, windows, n_tokens - k)

    group_of = torch.empty(batch, n_tokens, dtype=torch.int64, device=device)
    for at, group in enumerate(windows):
        tokens = group.tokens.to(device)
        n_windows, size = tokens.shape
        if k is not None and spread == "need":
            found = cut(trees[at], size - merges[at].flatten())
        else:
            wanted = None
            if k is not None:
                wanted = torch.tensor([counts[number] for number in group.number], device=device).repeat(batch)
            found = backend.labels(_distances_within(request, tokens), linkage, wanted, request.threshold)
        # A group's name is the token of its window that stands where its label says: below N, and no other group's.
        found = found.view(batch, n_windows, size)
        group_of[:, tokens.flatten()] = tokens.expand(found.shape).gather(2, found).flatten(1)
    return number_by_first_member(group_of)
