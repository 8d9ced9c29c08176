"""Single linkage: a minimum spanning tree, by Prim's algorithm, one row of the matrix per step."""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner, kernel
from agglo.clustering.keys import FAR, MAGNITUDE, NEVER, encode_in_place, first_index_of
from agglo.clustering.linkage.cpu.pairs import mirror, smallest_present
from agglo.clustering.linkage.cpu.workspace import padded, start

_ZERO, _BLOCK = np.uint64(0), np.uint64(8)


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


@kernel
def measure_asymmetry(part, parts, distances, found):
    """Write the largest |D[i, j] - D[j, i]| and |D[i, j]| over this part of one (N, N) matrix into found[part].

    Both as the bits of floats without sign, among which NaN and infinity are the largest. Blocks of 8 x 8 stay in
    registers: 64 images of 196 tokens take 1.3 ms, row by row 4.9 ms.
    """
    n = np.uint64(distances.shape[0])
    whole = n - n % _BLOCK
    skew, largest = np.int32(0), np.int32(0)
    for top in range(_ZERO, n, _BLOCK):
        if (top // _BLOCK) % np.uint64(parts) != np.uint64(part):
            continue
        for i in range(top, min(top + _BLOCK, n)):
            line = distances[i]
            for j in range(line.shape[0]):
                largest = max(largest, np.float32(line[j]).view(np.int32) & MAGNITUDE)
            for j in range(max(i, whole), n):
                skew = max(skew, np.float32(distances[i, j] - distances[j, i]).view(np.int32) & MAGNITUDE)
        if top < whole:
            for left in range(top, whole, _BLOCK):
                for i in range(_BLOCK):
                    for j in range(_BLOCK):
                        difference = distances[top + i, left + j] - distances[left + j, top + i]
                        skew = max(skew, np.float32(difference).view(np.int32) & MAGNITUDE)
    found[part, 0] = skew
    found[part, 1] = largest


@kernel
def spanning_tree(distances, work):
    """Record the N - 1 edges of the minimum spanning tree of one (N, N) matrix, by Prim's algorithm.

    Edges compare by (key, first token, second token), which makes the tree unique. For edges that end in the same token
    that is the order of (key, other token).
    """
    bits = distances.view(np.int32)
    n = bits.shape[0]
    stride = padded(n)
    start(n, work)
    if mirror(bits.reshape(-1), work.row[0], n, work) < 0:
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
