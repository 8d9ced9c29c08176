"""Clustering within windows of a grid of tokens: many small clusterings in place of a large one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agglo.clustering import dispatch
from agglo.clustering.distances import pairwise, weighted
from agglo.clustering.linkage.operators import Request
from agglo.clustering.tree import cut, number_by_first_member


class Windows(NamedTuple):
    """Windows of the same shape: their numbers among all windows, and which tokens (W, T) they hold."""

    number: list[int]
    tokens: Tensor


def windows_of(grid: tuple[int, int], window: tuple[int, int], device: torch.device) -> list[Windows]:
    """Return the windows of a grid by shape, at most four; those at the right and lower edge may be smaller."""
    token = torch.arange(grid[0] * grid[1], device=device).view(grid)
    by_shape: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}
    blocks = [block for rows in token.split(window[0]) for block in rows.split(window[1], dim=1)]
    for number, block in enumerate(blocks):
        numbers, tokens = by_shape.setdefault(tuple(block.shape), ([], []))
        numbers.append(number)
        tokens.append(block.flatten())
    return [Windows(numbers, torch.stack(tokens)) for numbers, tokens in by_shape.values()]


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


def labels(request: Request, grid: tuple[int, int], window: tuple[int, int], spread: str) -> Tensor:
    """Labels (B, N) for k groups in all windows of a grid together, divided by `spread`, or for a threshold."""
    device, k, linkage = request.data.device, request.k, request.linkage
    backend = dispatch.load(request.backend, device)
    batch, n_tokens = len(request.data), grid[0] * grid[1]
    windows = windows_of(grid, window, device)
    distances = [_distances_within(request, group.tokens) for group in windows]
    if k is not None and spread == "need":
        trees = [backend.tree(each, linkage) for each in distances]
        shapes = [(batch, len(group.number), group.tokens.shape[1] - 1) for group in windows]
        heights = [tree[..., 2].reshape(shape) for tree, shape in zip(trees, shapes, strict=True)]
        merges = by_need(heights, windows, n_tokens - k)
        sizes = [group.tokens.shape[1] for group in windows]
        found = [cut(tree, size - m.flatten()) for tree, size, m in zip(trees, sizes, merges, strict=True)]
    elif k is not None:
        sizes_by_number = {number: group.tokens.shape[1] for group in windows for number in group.number}
        counts = proportional(k, [sizes_by_number[number] for number in sorted(sizes_by_number)])
        wanted = [torch.tensor([counts[w] for w in group.number], device=device).repeat(batch) for group in windows]
        found = [backend.labels(each, linkage, ks, None) for each, ks in zip(distances, wanted, strict=True)]
    else:
        found = [backend.labels(each, linkage, None, request.threshold) for each in distances]

    group_of = torch.empty(batch, n_tokens, dtype=torch.int64, device=device)
    for (_, tokens), own in zip(windows, found, strict=True):
        # A group's name is the token of its window that stands where its label says: below N, and no other group's.
        own = own.view(batch, *tokens.shape)
        group_of[:, tokens.flatten()] = tokens.expand(own.shape).gather(2, own).flatten(1)
    return number_by_first_member(group_of)
