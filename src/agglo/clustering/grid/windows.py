"""Clustering within windows of a grid of tokens: many small clusterings in place of a large one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agglo.clustering.distances import matrices
from agglo.clustering.linkage.torch import cut, number_by_first_member


def _by_shape(grid: list[int], window: list[int], device: torch.device) -> list[tuple[list[int], Tensor]]:
    """Return the numbers and the tokens (W, T) of the windows of each shape: at most four, as edges cut some off."""
    token = torch.arange(grid[0] * grid[1], device=device).view(grid)
    found: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}
    blocks = [block for rows in token.split(window[0]) for block in rows.split(window[1], dim=1)]
    for number, block in enumerate(blocks):
        numbers, members = found.setdefault(tuple(block.shape), ([], []))
        numbers.append(number)
        members.append(block.flatten())
    return [(numbers, torch.stack(members)) for numbers, members in found.values()]


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


def _lowest(heights: list[Tensor], numbers: list[list[int]], n_merges: int) -> list[Tensor]:
    """Count (B, W), for each shape, every window's merges among the n_merges lowest of all windows.

    Heights (B, W, T-1) of every shape ascend. Of equal heights the first window's merge comes first.
    """
    each = [h.shape[2] for h in heights]
    number = torch.cat([torch.tensor(own).repeat_interleave(n) for own, n in zip(numbers, each, strict=True)])
    height = torch.cat([part.flatten(1) for part in heights], dim=1)
    order = number.to(height.device).argsort(stable=True)
    order = order[height[:, order].argsort(dim=1, stable=True)]  # by height, then window, then row of its tree
    chosen = torch.zeros_like(height, dtype=torch.int64).scatter(1, order[:, :n_merges], 1)
    parts = chosen.split([part.shape[1] * part.shape[2] for part in heights], dim=1)
    return [part.view(shape.shape).sum(dim=2) for part, shape in zip(parts, heights, strict=True)]


def labels(
    data: Tensor,
    metric: str,
    weights: Tensor | None,
    grid: list[int],
    window: list[int],
    find: Callable[..., Tensor],
    linkage: str,
    k: int | None,
    threshold: float | None,
    spread: str,
) -> Tensor:
    """Labels (B, N) by `labels` of a backend, `find`; other arguments as of `operators.cluster`."""
    batch, n_tokens = data.shape[:2]
    numbers, tokens = zip(*_by_shape(grid, window, data.device), strict=True)
    distances = []
    for inside in tokens:
        of_pairs = (inside.unsqueeze(2), inside.unsqueeze(1)) if metric == "precomputed" else (inside,)
        own_weights = None if weights is None else weights[:, inside].flatten(0, 1)
        distances.append(matrices(data[(slice(None), *of_pairs)].flatten(0, 1), metric, own_weights))
    if k is not None and spread == "need":
        from agglo.clustering.linkage import cpu  # compiled kernels load when they are needed

        trees = [cpu.tree(each.cpu(), linkage) for each in distances]
        heights = [tree[..., 2].reshape(batch, *own[:, 1:].shape) for tree, own in zip(trees, tokens, strict=True)]
        merges = _lowest(heights, list(numbers), n_tokens - k)
        counted = zip(trees, merges, strict=True)
        found = [cut(tree, tree.shape[1] + 1 - m.flatten()).to(data.device) for tree, m in counted]
    elif k is not None:
        size_of = {w: own.shape[1] for of_shape, own in zip(numbers, tokens, strict=True) for w in of_shape}
        counts = proportional(k, [size_of[w] for w in sorted(size_of)])
        wanted = [torch.tensor([counts[w] for w in own] * batch, device=data.device) for own in numbers]
        found = [find(each, linkage, ks, None) for each, ks in zip(distances, wanted, strict=True)]
    else:
        found = [find(each, linkage, None, threshold) for each in distances]

    group_of = torch.empty(batch, n_tokens, dtype=torch.int64, device=data.device)
    for inside, own in zip(tokens, found, strict=True):
        # A group's name is the token of its window that stands where its label says: below N, and no other group's.
        own = own.view(batch, *inside.shape)
        group_of[:, inside.flatten()] = inside.expand(own.shape).gather(2, own).flatten(1)
    return number_by_first_member(group_of)
