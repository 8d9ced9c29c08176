"""Clustering on a grid with tensor operations alone, on every device. The definition is `grid/reference.py`.

Merges happen in rounds. An average over edges depends on the order of the merges around it, so a pair merges only when
its edge comes before every edge of its neighbours too: nothing next to it can merge earlier then, and no two merges of
a round touch. Sorted by (length, number) these are the very merges of one-at-a-time merging, in its order. On smooth
images of 64 x 64 to 192 x 192 tokens it took 56 to 84 rounds for average linkage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agglo.clustering.grid.edges import neighbours
from agglo.clustering.linkage.torch import INF, Merges, connected, sum_dtype, within
from agglo.clustering.tree import number_by_first_member


class Edges(NamedTuple):
    """Edges of every image, each (B, E): the two groups, the length (infinite: no edge), the number."""

    one: Tensor
    two: Tensor
    length: Tensor
    number: Tensor

    def take(self, slots: Tensor) -> Edges:
        return Edges(*(field.gather(1, slots) for field in self))


def _first_around(edges: Edges, length: Tensor, number: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Find the least (length, number) among the edges of every group (B, N)."""
    nobody = edges.number.shape[1] * 4 + 4 * n
    ends = torch.cat([edges.one, edges.two], dim=1)
    length, number = torch.cat([length, length], dim=1), torch.cat([number, number], dim=1)
    least = length.new_full((len(length), n), INF).scatter_reduce(1, ends, length, "amin")
    number = torch.where(length == least.gather(1, ends), number, nobody)
    return least, number.new_full(least.shape, nobody).scatter_reduce(1, ends, number, "amin")


def _joined(edges: Edges, grows: Tensor, size: Tensor, linkage: str) -> Edges:
    """Join every two edges between the same groups, and remove those within a group.

    grows (B, E): the size of the group at whichever end of the edge has just merged, before that.
    """
    n = size.shape[1]
    low, high = torch.minimum(edges.one, edges.two), torch.maximum(edges.one, edges.two)
    dead = (low == high) | (edges.length == INF)
    code = torch.where(dead, n * n, low * n + high)
    code, order = code.sort(dim=1, stable=True)
    edges, weight = edges.take(order), grows.gather(1, order)
    length, number = edges.length.masked_fill(code == n * n, INF), edges.number
    twice = (code[:, 1:] == code[:, :-1]) & (code[:, 1:] < n * n)
    x, y, number_x, number_y = length[:, :-1], length[:, 1:], number[:, :-1], number[:, 1:]
    shorter = torch.minimum(x, y)
    if linkage == "single":
        combined = shorter
    elif linkage == "complete":
        combined = torch.maximum(x, y)
    else:
        weight_x, weight_y = weight[:, :-1], weight[:, 1:]
        combined = torch.maximum((weight_x * x + weight_y * y) / (weight_x + weight_y), shorter)
    number_kept = torch.where((x < y) | ((x == y) & (number_x < number_y)), number_x, number_y)
    nothing = torch.zeros_like(code[:, :1], dtype=torch.bool)
    first, second = torch.cat([twice, nothing], dim=1), torch.cat([nothing, twice], dim=1)
    pad = (0, 1)
    length = torch.where(first, torch.nn.functional.pad(combined, pad), length).masked_fill(second, INF)
    number = torch.where(first, torch.nn.functional.pad(number_kept, pad), number)
    return Edges(edges.one, edges.two, length, number)


def _shortened(edges: Edges) -> Edges:
    """Drop the slots that hold an edge in no image, if those are many; the host waits for their number."""
    left = edges.length < INF
    most = int(left.sum(dim=1).max())
    if most * 2 > edges.length.shape[1] or most == 0:
        return edges
    return edges.take((~left).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most])


def _merges(
    distances: Tensor, height: int, width: int, linkage: str, target: Tensor, threshold: float
) -> tuple[Merges, Tensor]:
    """Merges until the first `target` (B,), or all within the threshold, are among them; and the numbers of theirs."""
    batch, n_edges = distances.shape
    n, device = height * width, distances.device
    first, second = (ends.expand(batch, n_edges) for ends in neighbours(height, width, device))
    length = distances.to(sum_dtype(device))
    edges = Edges(first, second, length, torch.arange(n_edges, device=device).expand(batch, n_edges))
    here = torch.arange(n, device=device).expand(batch, n)
    size = length.new_ones(batch, n)
    merges = Merges(length.new_full((batch, n), INF), here.clone(), here.clone())
    numbers = torch.full((batch, n), n_edges, device=device)
    while True:
        least, number = _first_around(edges, edges.length, edges.number, n)
        closest = least.amin(dim=1, keepdim=True)
        closest_number = number.masked_fill(least > closest, 4 * (n_edges + n)).amin(dim=1, keepdim=True)
        before = (merges.height < closest) | ((merges.height == closest) & (numbers < closest_number))
        done = (before & (merges.height < INF)).sum(dim=1) >= target
        active = ~done & within(closest[:, 0], threshold) & (closest[:, 0] < INF)
        if not bool(active.any()):
            return merges, numbers

        ends = [(least.gather(1, group), number.gather(1, group)) for group in (edges.one, edges.two)]
        one_first = (ends[0][0] < ends[1][0]) | ((ends[0][0] == ends[1][0]) & (ends[0][1] < ends[1][1]))
        nearby = torch.where(one_first, ends[0][0], ends[1][0]), torch.where(one_first, ends[0][1], ends[1][1])
        nearby = nearby[0].masked_fill(edges.length == INF, INF), nearby[1]
        _, around = _first_around(edges, *nearby, n)
        # Numbers are unique, so the least (length, number) around a group is known by its number.
        merging = (around.gather(1, edges.one) == edges.number) & (around.gather(1, edges.two) == edges.number)
        merging &= active.unsqueeze(1) & within(edges.length, threshold) & (edges.length < INF)

        keeps, leaves = torch.minimum(edges.one, edges.two), torch.maximum(edges.one, edges.two)
        slot = torch.where(merging, leaves, n)  # a group leaves once at most; what does not merge goes to a spare slot
        parent = _write(here, slot, keeps)
        merges = Merges(_write(merges.height, slot, edges.length), _write(merges.first, slot, keeps), merges.second)
        numbers = _write(numbers, slot, edges.number)

        merged = _write(torch.zeros_like(here, dtype=torch.bool), slot, merging)
        merged = _write(merged, torch.where(merging, keeps, n), merging)
        grows = torch.where(merged.gather(1, edges.one), size.gather(1, edges.one), size.gather(1, edges.two))
        size = size.scatter_add(1, parent, torch.where(parent == here, 0.0, size))
        edges = edges._replace(one=parent.gather(1, edges.one), two=parent.gather(1, edges.two))
        edges = _shortened(_joined(edges, grows, size, linkage))


def _write(values: Tensor, slot: Tensor, news: Tensor) -> Tensor:
    """Write news (B, E) into values (B, N) at the slots (B, E); slot N throws them away."""
    spare = torch.cat([values, values[:, :1]], dim=1)
    return spare.scatter(1, slot, news)[:, :-1]


def labels(
    distances: Tensor, height: int, width: int, linkage: str, k: Tensor | None, threshold: float | None
) -> Tensor:
    """Labels (B, N) from edge distances (B, E), for k (B,) groups per item or all merges within a threshold."""
    batch, n = len(distances), height * width
    if batch == 0 or n == 1:
        return torch.zeros(batch, n, dtype=torch.int64, device=distances.device)
    limit = INF if threshold is None else float(torch.tensor(threshold, dtype=torch.float32))
    target = torch.full((batch,), n - 1, device=distances.device) if k is None else n - k
    merges, numbers = _merges(distances, height, width, linkage, target, limit)
    order = numbers.argsort(dim=1)
    order = order.gather(1, merges.height.gather(1, order).argsort(dim=1, stable=True))
    merges = Merges(*(field.gather(1, order) for field in merges))
    wanted = torch.arange(n, device=distances.device) < target.unsqueeze(1)
    wanted &= within(merges.height, limit)
    return number_by_first_member(connected(merges._replace(height=merges.height.masked_fill(~wanted, INF))))
