"""Single linkage: a minimum spanning tree, by Prim's algorithm, one row of the matrix per step."""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner
from agglo.clustering.keys import FAR, NEVER, encode_in_place, first_index_of
from agglo.clustering.linkage.cpu.pairs import mirror, smallest_present
from agglo.clustering.linkage.cpu.workspace import padded


@inner
def reach_from(v, line, near, parent):
    """Update the nearest tree token of all others by the edges `line` of token v, just added to the tree."""
    for c in range(line.shape[0]):
        closer = (line[c] < near[c]) | ((line[c] == near[c]) & (v < parent[c]))
        near[c] = line[c] if closer else near[c]
        parent[c] = v if closer else parent[c]


@inner
def count_of(line, key):
    count = np.int32(0)
    for b in range(line.shape[0]):
        count += np.int32(line[b] == key)
    return count


@inner
def first_edge(n, key, best, near, parent):
    """Find the token outside whose edge comes first among those reached at this key."""
    for c in range(best + 1, n):
        if near[c] == key:
            one, two = min(c, parent[c]), max(c, parent[c])
            best_one, best_two = min(best, parent[best]), max(best, parent[best])
            if one < best_one or (one == best_one and two < best_two):
                best = c
    return best


@inner
def spanning_tree(distances, work):
    """Record the N - 1 edges of the minimum spanning tree of one (N, N) matrix, by Prim's algorithm.

    Edges compare by (key, first token, second token), which makes the tree unique. For edges that end in the same token
    that is the order of (key, other token).
    """
    n = distances.shape[0]
    stride = padded(n)
    if mirror(distances.view(np.int32), work) < 0:
        encode_in_place(work.square[: n * stride])
    near, parent, inside = work.nearest[0, :stride], work.neighbour[0, :stride], work.gone[:stride]
    for c in range(stride):
        near[c] = FAR if c < n else NEVER
        parent[c] = n
    v = np.int32(0)
    for m in range(n - 1):
        near[v] = NEVER  # nobody is closer, so it never changes again
        inside[v] = FAR
        reach_from(v, work.square[v * stride : (v + 1) * stride], near, parent)
        smallest = smallest_present(near, inside)
        best = first_index_of(near, smallest)
        if count_of(near, smallest) > 1:
            best = first_edge(n, smallest, best, near, parent)
        work.merges[0, m] = smallest
        work.merges[1, m] = min(best, parent[best])
        work.merges[2, m] = max(best, parent[best])
        v = np.int32(best)
    return n - 1
