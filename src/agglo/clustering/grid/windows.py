"""Clustering within windows of a grid of tokens: many small clusterings in place of a large one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from agglo.clustering.distances import matrices
from agglo.clustering.linkage.torch import cut, number_by_first_member


@lru_cache(maxsize=64)
def _by_shape(
    grid: tuple[int, int], window: tuple[int, int], device: torch.device
) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the numbers and the tokens (W, T) of the windows of each shape: at most four, as edges cut some off."""
    token = torch.arange(grid[0] * grid[1], device=device).view(grid)
    found: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}
    blocks = [block for rows in token.split(window[0]) for block in rows.split(window[1], dim=1)]
    for number, block in enumerate(blocks):
        numbers, members = found.setdefault(tuple(block.shape), ([], []))
        numbers.append(number)
        members.append(block.flatten())
    return [(tuple(numbers), torch.stack(members)) for numbers, members in found.values()]


@lru_cache(maxsize=64)
def _shares(k: int, grid: tuple[int, int], window: tuple[int, int], batch: int, device: torch.device) -> list[Tensor]:
    """Return k groups shared out evenly, (B * W,) for each shape: copied to the device once."""
    shapes = _by_shape(grid, window, device)
    size_of = {number: tokens.shape[1] for numbers, tokens in shapes for number in numbers}
    counts = proportional(k, [size_of[number] for number in sorted(size_of)])
    return [torch.tensor([counts[number] for number in numbers] * batch, device=device) for numbers, _ in shapes]


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


def _lowest(heights: list[Tensor], numbers: Sequence[Sequence[int]], n_merges: int) -> list[Tensor]:
    """Count (B, W), for each shape, every window's merges among the n_merges lowest of all windows.

    Heights (B, W, T-1) of every shape ascend. Of equal heights the first window's merge comes first.
    """
    each = [h.shape[2] for h in heights]
    number = torch.cat([torch.tensor(own).repeat_interleave(n) for own, n in zip(numbers, each, strict=True)])
    height = torch.cat([part.flatten(1) for part in heights], dim=1)
    order = number.argsort(stable=True)
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
    """Labels (B, N) by `labels` of a backend, `find`; other arguments as of `operators.cluster`.

    Trees, which tell the need, grow on the CPU: spread="need" alone waits for distances, and sends labels back.
    """
    batch, n_tokens = data.shape[:2]
    sides = (grid[0], grid[1]), (window[0], window[1])
    numbers, tokens = zip(*_by_shape(*sides, data.device), strict=True)
    distances = []
    for inside in tokens:
        of_pairs = (inside.unsqueeze(2), inside.unsqueeze(1)) if metric == "precomputed" else (inside,)
        own_weights = None if weights is None else weights[:, inside].flatten(0, 1)
        distances.append(matrices(data[(slice(None), *of_pairs)].flatten(0, 1), metric, own_weights))
    if k is not None and spread == "need":
        from agglo.clustering.linkage import cpu  # compiled kernels load when they are needed

        tokens = tuple(inside for _, inside in _by_shape(*sides, torch.device("cpu")))
        trees = [cpu.tree(each.cpu(), linkage) for each in distances]
        heights = [tree[..., 2].reshape(batch, *own[:, 1:].shape) for tree, own in zip(trees, tokens, strict=True)]
        merges = _lowest(heights, numbers, n_tokens - k)
        found = [cut(tree, tree.shape[1] + 1 - m.flatten()) for tree, m in zip(trees, merges, strict=True)]
    elif k is not None:
        wanted = _shares(k, *sides, batch, data.device)
        found = [find(each, linkage, ks, None) for each, ks in zip(distances, wanted, strict=True)]
    else:
        found = [find(each, linkage, None, threshold) for each in distances]

    group_of = torch.empty(batch, n_tokens, dtype=torch.int64, device=found[0].device)
    for inside, own in zip(tokens, found, strict=True):
        # A group's name is the token of its window that stands where its label says: below N, and no other group's.
        own = own.view(batch, *inside.shape)
        group_of[:, inside.flatten()] = inside.expand(own.shape).gather(2, own).flatten(1)
    return number_by_first_member(group_of).to(data.device)
