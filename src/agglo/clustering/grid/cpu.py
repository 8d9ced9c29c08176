"""Clustering on a grid, where only neighbouring groups merge: a heap of edges. Defined in `grid/reference.py`.

Of two groups that merge, the one with fewer edges hands them over to the other. An edge whose length does not change
keeps its place in the heap, so every edge enters it once, and once more for every edge it takes in: 2E entries at most.
Whether two groups share an edge is looked up in the shorter of their lists; on a plane these are short.

An edge e has two ends, 2e and 2e + 1, each in the list of the group it belongs to; the other end of h is h ^ 1.
"""

from __future__ import annotations

import itertools
from collections import namedtuple

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.distances import grid_edges
from agglo.clustering.kernels import inner, kernel
from agglo.clustering.linkage.cpu import run
from agglo.clustering.linkage.cpu.cuts import root_of
from agglo.clustering.linkage.torch import number_by_first_member

_SINGLE, _AVERAGE, _COMPLETE = 0, 1, 2
_MODES = {"single": _SINGLE, "average": _AVERAGE, "complete": _COMPLETE}

Graph = namedtuple(
    "Graph", "group after before begin degree size parent length number heap_length heap_number heap_edge"
)


def _graph(n: int, n_edges: int) -> Graph:
    """The groups and edges of one image of N tokens and E edges, and the heap."""
    both = 2 * n_edges
    return Graph(
        group=np.empty(both, np.int32),  # which group an end belongs to
        after=np.empty(both, np.int32),  # the next end in the group's list, or -1
        before=np.empty(both, np.int32),
        begin=np.empty(n, np.int32),  # the first end of a group's list, or -1
        degree=np.empty(n, np.int32),
        size=np.empty(n),
        parent=np.empty(n, np.int32),
        length=np.empty(n_edges),  # NaN once its ends are in one group, or another edge took it in
        number=np.empty(n_edges, np.int32),
        heap_length=np.empty(both),  # what the heap is ordered by, then
        heap_number=np.empty(both, np.int32),
        heap_edge=np.empty(both, np.int32),
    )


@inner
def comes_before(graph, one, two):
    a, b = graph.heap_length[one], graph.heap_length[two]
    return a < b or (a == b and graph.heap_number[one] < graph.heap_number[two])


@inner
def swap(graph, one, two):
    for column in (graph.heap_number, graph.heap_edge):
        column[one], column[two] = column[two], column[one]
    lengths = graph.heap_length
    lengths[one], lengths[two] = lengths[two], lengths[one]


@inner
def sink(graph, at, count):
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and comes_before(graph, child + 1, child):
            child += 1
        if not comes_before(graph, child, at):
            return
        swap(graph, at, child)
        at = child


@inner
def push(graph, edge, count):
    graph.heap_length[count] = graph.length[edge]
    graph.heap_number[count] = graph.number[edge]
    graph.heap_edge[count] = edge
    at = count
    while at > 0 and comes_before(graph, at, (at - 1) // 2):
        swap(graph, at, (at - 1) // 2)
        at = (at - 1) // 2


@inner
def link(graph, end, group):
    following = graph.begin[group]
    graph.group[end] = group
    graph.before[end] = -1
    graph.after[end] = following
    if following >= 0:
        graph.before[following] = end
    graph.begin[group] = end
    graph.degree[group] += 1


@inner
def unlink(graph, end):
    group, before, after = graph.group[end], graph.before[end], graph.after[end]
    if before >= 0:
        graph.after[before] = after
    else:
        graph.begin[group] = after
    if after >= 0:
        graph.before[after] = before
    graph.degree[group] -= 1


@inner
def edge_between(graph, one, two):
    """The edge between two groups, or -1."""
    if graph.degree[two] < graph.degree[one]:
        one, two = two, one
    end = graph.begin[one]
    while end >= 0:
        if graph.group[end ^ 1] == two:
            return end >> 1
        end = graph.after[end]
    return -1


@inner
def take_in(graph, kept, other, kept_size, other_size, mode):
    """Let one edge take in another to the same group, which ends. Returns whether it changed."""
    x, y = graph.length[kept], graph.length[other]
    nearer = x < y or (x == y and graph.number[kept] < graph.number[other])
    number = graph.number[kept] if nearer else graph.number[other]
    if mode == _SINGLE:
        length = min(x, y)
    elif mode == _COMPLETE:
        length = max(x, y)
    else:
        length = max((kept_size * x + other_size * y) / (kept_size + other_size), min(x, y))
    changed = length != x or number != graph.number[kept]
    graph.length[kept] = length
    graph.number[kept] = number
    graph.length[other] = np.nan
    return changed


@inner
def merge(graph, edge, mode, count):
    """Merge the groups at the ends of an edge. Returns how many entries the heap has then."""
    one, two = graph.group[2 * edge], graph.group[2 * edge + 1]
    big, small = (one, two) if graph.degree[one] >= graph.degree[two] else (two, one)
    end = graph.begin[small]
    while end >= 0:
        following = graph.after[end]
        third = graph.group[end ^ 1]
        if third == big:
            unlink(graph, end ^ 1)
            graph.length[end >> 1] = np.nan
        else:
            shared = edge_between(graph, big, third)
            if shared >= 0:
                unlink(graph, end ^ 1)
                if take_in(graph, shared, end >> 1, graph.size[big], graph.size[small], mode):
                    push(graph, shared, count)
                    count += 1
            else:
                link(graph, end, big)
        end = following
    graph.size[big] += graph.size[small]
    graph.parent[small] = big
    return count


@kernel
def group_tokens(distances, first, second, target, limit, mode, groups, graph):
    """Write group ids (N,) from edge distances (E,): the first `target` merges, of those within the limit."""
    n, n_edges = groups.shape[0], distances.shape[0]
    for i in range(n):
        graph.begin[i] = -1
        graph.degree[i] = 0
        graph.size[i] = 1
        graph.parent[i] = i
    for e in range(n_edges):
        link(graph, 2 * e, first[e])
        link(graph, 2 * e + 1, second[e])
        graph.length[e] = distances[e]
        graph.number[e] = e
        graph.heap_length[e] = distances[e]
        graph.heap_number[e] = e
        graph.heap_edge[e] = e
    count = n_edges
    for back in range(n_edges // 2):
        sink(graph, n_edges // 2 - 1 - back, count)
    merged = 0
    while merged < target and count > 0:
        edge, length, number = graph.heap_edge[0], graph.heap_length[0], graph.heap_number[0]
        count -= 1
        swap(graph, 0, count)
        sink(graph, 0, count)
        # What has changed since it was pushed has been pushed again.
        if graph.length[edge] == length and graph.number[edge] == number:
            if np.float32(length) > limit:
                break
            count = merge(graph, edge, mode, count)
            merged += 1
    for i in range(n):
        groups[i] = root_of(graph.parent, i)


def labels(distances: Tensor, grid: list[int], linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) from edge distances (B, E), for k (B,) groups per item or all merges within a threshold."""
    batch, n_edges = distances.shape
    n = grid[0] * grid[1]
    first, second = (ends.numpy() for ends in grid_edges(grid))
    lengths = distances.contiguous().numpy()
    targets = np.full(batch, n - 1) if k is None else n - k.numpy()
    limit = np.float32(np.inf if threshold is None else threshold)
    result = np.empty((batch, n), np.int64)
    images = itertools.count()

    def group_images(_part: int, _parts: int) -> None:
        graph = _graph(n, n_edges)
        while (b := next(images)) < batch:
            group_tokens(lengths[b], first, second, targets[b], limit, _MODES[linkage], result[b], graph)

    run(group_images, max(1, min(torch.get_num_threads(), batch)))
    return number_by_first_member(torch.from_numpy(result))
