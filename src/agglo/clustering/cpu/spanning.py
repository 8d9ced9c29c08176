"""Single linkage: a minimum spanning tree, by Prim's algorithm, one row of the matrix per step."""

from __future__ import annotations

import numpy as np

from agglo.clustering.cpu.jit import inner, kernel
from agglo.clustering.cpu.keys import FAR, NEVER, NOT_KEYS, any_negative, copy_into, first_index_of
from agglo.clustering.cpu.one_at_a_time import mirror, smallest_present
from agglo.clustering.cpu.workspace import padded, start

_ZERO, _TILE = np.uint64(0), np.uint64(32)
_MIRROR_UP_TO = 512  # tokens: while the symmetric matrix stays in cache, reading lines of it beats reading columns


@inner
def reach_from(v, line, near, parent):
    """Let token v, just added to the tree, offer its edges `line` to the tokens outside."""
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
    """Of the tokens outside that are reached at this key, the one whose edge comes first."""
    for c in range(best + 1, n):
        if near[c] == key:
            one, two = min(c, parent[c]), max(c, parent[c])
            best_one, best_two = min(best, parent[best]), max(best, parent[best])
            if one < best_one or (one == best_one and two < best_two):
                best = c
    return best


@kernel
def compare_halves(part, parts, keys, work):
    """Note in work.asymmetric[part] whether the halves of a square matrix differ anywhere in this part's tiles."""
    n = np.uint64(keys.shape[0])
    work.asymmetric[part] = False
    tile = 0
    for top in range(_ZERO, n, _TILE):
        for left in range(top, n, _TILE):
            tile += 1
            if tile % parts != part:
                continue
            differ = np.int32(0)
            for i in range(top, min(top + _TILE, n)):
                for j in range(left, min(left + _TILE, n)):
                    differ |= keys[i, j] ^ keys[j, i]
            if differ != 0:
                work.asymmetric[part] = True
                return


@inner
def spanning_tree(keys, compared, work):
    """Record the N - 1 edges of the minimum spanning tree of one square matrix of keys, by Prim's algorithm.

    Edges compare by (key, first token, second token), which makes the tree unique. For edges that end in the same token
    that is the order of (key, other token). `compared` says that `compare_halves` has been done.
    """
    n = keys.shape[0]
    stride = padded(n)
    start(n, work)
    in_cache = n <= _MIRROR_UP_TO
    negative = mirror(keys.reshape(-1), work.row[0], n, work) < 0 if in_cache else any_negative(keys)
    if negative and not work.is_encoded[0]:
        return NOT_KEYS
    # Where both halves are equal to the last bit, a row of the matrix serves as it is.
    symmetric = not in_cache and not work.is_encoded[0]
    if symmetric:
        if not compared:
            compare_halves(0, 1, keys, work)
        for part in range(work.asymmetric.shape[0]):
            symmetric = symmetric and not work.asymmetric[part]
    near, parent, inside = work.nearest[0, :stride], work.neighbour[0, :stride], work.gone[:stride]
    for c in range(stride):
        near[c] = FAR if c < n else NEVER
        inside[c] = NEVER if c < n else FAR
        parent[c] = n
    v = np.int32(0)
    for m in range(n - 1):
        near[v] = NEVER  # nobody is closer, so it never changes again
        inside[v] = FAR
        if in_cache:
            reach_from(v, work.square[v * stride : (v + 1) * stride], near, parent)
        elif symmetric:
            reach_from(v, keys[v], near, parent)
        else:
            line = work.lines[0, 0, :n]
            for c in range(_ZERO, np.uint64(v)):
                if inside[c] != FAR:
                    line[c] = keys[c, v]
            copy_into(line[v:], keys[v, v:])
            reach_from(v, line, near, parent)
        smallest = smallest_present(near, inside)
        best = first_index_of(near, smallest)
        if count_of(near, smallest) > 1:
            best = first_edge(n, smallest, best, near, parent)
        work.merges[0, m] = smallest
        work.merges[1, m] = min(best, parent[best])
        work.merges[2, m] = max(best, parent[best])
        v = np.int32(best)
    return n - 1
