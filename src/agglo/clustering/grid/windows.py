"""Clustering within windows of a grid of tokens: many small clusterings in place of a large one."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from agglo.clustering.distances import pairwise, weighted
from agglo.clustering.tree import cut, number_by_first_member


class Windows(NamedTuple):
    """Windows of one shape: their numbers among all, the tokens (W, T) they hold, and distances (B * W, T, T)."""

    number: list[int]
    tokens: Tensor
    distances: Tensor


def split(data: Tensor, metric: str, weights: Tensor | None, grid: list[int], window: list[int]) -> list[Windows]:
    """Return the windows of a grid by shape, at most four; those at the right and lower edge may be smaller.

    Data are features (B, N, D) or distances (B, N, N), weights (B, N) or None. Distances of windows are weighted.
    """
    token = torch.arange(grid[0] * grid[1], device=data.device).view(grid)
    by_shape: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}
    blocks = [block for rows in token.split(window[0]) for block in rows.split(window[1], dim=1)]
    for number, block in enumerate(blocks):
        numbers, members = by_shape.setdefault(tuple(block.shape), ([], []))
        numbers.append(number)
        members.append(block.flatten())
    found = []
    for numbers, members in by_shape.values():
        tokens = torch.stack(members)
        if metric == "precomputed":
            distances = data[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].to(torch.float32).flatten(0, 1).contiguous()
        else:
            distances = pairwise(data[:, tokens].flatten(0, 1), metric)
        if weights is not None:
            distances = weighted(distances, weights[:, tokens].flatten(0, 1))
        found.append(Windows(numbers, tokens, distances))
    return found


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


def labels(
    windows: list[Windows], backend: ModuleType, linkage: str, k: int | None, threshold: float | None, spread: str
) -> Tensor:
    """Labels (B, N) for k groups in all windows of a grid together, divided by `spread`, or for a threshold."""
    device, sizes = windows[0].tokens.device, [group.tokens.shape[1] for group in windows]
    n_tokens = sum(group.tokens.numel() for group in windows)
    batch = len(windows[0].distances) // len(windows[0].number)
    if k is not None and spread == "need":
        trees = [backend.tree(group.distances, linkage) for group in windows]
        heights = [tree[..., 2].reshape(batch, *w.tokens[:, 1:].shape) for tree, w in zip(trees, windows, strict=True)]
        merges = by_need(heights, windows, n_tokens - k)
        found = [cut(tree, size - m.flatten()) for tree, size, m in zip(trees, sizes, merges, strict=True)]
    elif k is not None:
        size_of = {number: size for group, size in zip(windows, sizes, strict=True) for number in group.number}
        counts = proportional(k, [size_of[number] for number in sorted(size_of)])
        wanted = [torch.tensor([counts[w] for w in group.number], device=device).repeat(batch) for group in windows]
        found = [backend.labels(group.distances, linkage, ks, None) for group, ks in zip(windows, wanted, strict=True)]
    else:
        found = [backend.labels(group.distances, linkage, None, threshold) for group in windows]

    group_of = torch.empty(batch, n_tokens, dtype=torch.int64, device=device)
    for (_, tokens, _), own in zip(windows, found, strict=True):
        # A group's name is the token of its window that stands where its label says: below N, and no other group's.
        own = own.view(batch, *tokens.shape)
        group_of[:, tokens.flatten()] = tokens.expand(own.shape).gather(2, own).flatten(1)
    return number_by_first_member(group_of)
