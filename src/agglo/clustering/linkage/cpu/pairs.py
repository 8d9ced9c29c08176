"""One merge after another: the closest pair of groups, or the next edge of a spanning tree for single linkage.

Here the whole symmetric matrix is stored, so that a group's keys are one line. Lines are padded with FAR to a multiple
of what a vector loop takes in one step, because its scalar remainder would cost more than the rest at these lengths.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner
from agglo.clustering.linkage.cpu import keys

STALE = np.int32(-1)
_ZERO, _ONE, _FOUR = np.uint64(0), np.uint64(1), np.uint64(4)


@inner
def mirror(matrix, work):
    """Write the upper triangle of keys (N, N) into both halves of work.square, and return the smallest key."""
    n = matrix.shape[0]
    stride = keys.padded(n)
    smallest = keys.FAR
    for a in range(n):
        line = work.square[a * stride : (a + 1) * stride]
        line[a] = keys.FAR
        keys.copy_into(line[a + 1 : n], matrix[a, a + 1 :])
        smallest = min(smallest, keys.smallest_key(line[a:n]))
        for b in range(n, stride):
            line[b] = keys.FAR
    transpose_upper(work.square, np.uint64(n), np.uint64(stride))
    for a in range(n):
        work.gone[a] = keys.NEVER
    for a in range(n, stride):
        work.gone[a] = keys.FAR
        work.nearest[0, a] = keys.FAR
        work.neighbour[0, a] = STALE
    return smallest


@inner
def transpose_upper(square, n, stride):
    """Copy the upper triangle to the lower one in squares of 4 x 4, which stay in registers."""
    whole = n - n % _FOUR
    for a in range(_ZERO, whole, _FOUR):
        for b in range(a + _FOUR, whole, _FOUR):
            source, target = a * stride + b, b * stride + a
            for i in range(_FOUR):
                for j in range(_FOUR):
                    square[target + j * stride + i] = square[source + i * stride + j]
        for i in range(a, a + _FOUR):
            for j in range(i + _ONE, a + _FOUR):
                square[j * stride + i] = square[i * stride + j]
    for b in range(whole, n):
        for a in range(_ZERO, b):
            square[b * stride + a] = square[a * stride + b]


@inner
def smallest_present(line, gone):
    smallest = keys.FAR
    for b in range(line.shape[0]):
        smallest = min(smallest, max(line[b], gone[b]))
    return smallest


@inner
def first_present(line, gone, key):
    n = np.int32(line.shape[0])
    found = n
    for b in range(line.shape[0]):
        candidate = np.int32(b) if max(line[b], gone[b]) == key else n
        found = min(found, candidate)
    return found


@inner
def look_around(n, i, work):
    """Find the nearest neighbour of group i again."""
    stride = keys.padded(n)
    line, gone = work.square[i * stride : (i + 1) * stride], work.gone[:stride]
    key = smallest_present(line, gone)
    work.nearest[0, i] = key
    work.neighbour[0, i] = first_present(line, gone, key)


@inner
def join_groups(n, i, j, average, recorded, work):
    """Merge group j into group i < j and record it, or note that rounding leaves it in doubt.

    Columns of groups that are gone keep arbitrary keys.
    """
    stride = keys.padded(n)
    square = work.square
    x, y = square[i * stride : (i + 1) * stride], square[j * stride : (j + 1) * stride]
    if average and work.deepest[0] > 0 and not keys.is_certain_pair(n, i, j, work):
        work.in_doubt[0] = True
        return
    work.merges[0, recorded] = x[j]
    work.merges[1, recorded] = work.first[i]
    work.merges[2, recorded] = work.first[j]
    if average:
        total = work.size[i] + work.size[j]
        keys.average_in_place(x, y, work.size[i] / total, work.size[j] / total)
        work.size[i] = total
        keys.deepen(i, i, j, work)
    else:
        keys.maximum_in_place(x, y)
    x[i] = keys.FAR
    work.gone[j] = keys.FAR
    work.nearest[0, j] = keys.FAR
    column, step = np.uint64(i), np.uint64(stride)
    for p in range(_ZERO, np.uint64(n)):
        square[p * step + column] = x[p]


@inner
def merge_closest_pairs(distances, target, limit, average, work):
    """Merge the closest pair of one matrix (N, N) until `target` merges are recorded, or it is beyond the limit.

    A nearest-neighbour key stays a lower bound when that neighbour merges, so a group looks around again only when its
    bound is the smallest of all. Where that happens too often, `chains` must take over. Returns the merges recorded.
    """
    n = distances.shape[0]
    stride = keys.padded(n)
    if mirror(distances.view(np.int32), work) < 0:  # the bits of negative distances are no keys
        work.in_doubt[0] = True
        return 0
    for a in range(n):
        look_around(n, a, work)
    nearest, neighbour = work.nearest[0, :stride], work.neighbour[0, :stride]
    recorded = 0
    patience = 4 * n
    while True:
        smallest = keys.smallest_key(nearest)
        if recorded >= target or smallest == keys.FAR or smallest > limit:
            work.left[0] = smallest
            return recorded
        i = keys.first_index_of(nearest, smallest)
        if neighbour[i] == STALE:
            if patience == 0:
                work.in_doubt[0] = True
                return recorded
            patience -= 1
        else:
            j = neighbour[i]
            join_groups(n, i, j, average, recorded, work)
            if work.in_doubt[0]:
                return recorded
            recorded += 1
            for p in range(stride):
                neighbour[p] = STALE if neighbour[p] == i or neighbour[p] == j else neighbour[p]
        look_around(n, i, work)


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
    stride = keys.padded(n)
    if mirror(distances.view(np.int32), work) < 0:
        keys.encode_in_place(work.square[: n * stride])
    near, parent, inside = work.nearest[0, :stride], work.neighbour[0, :stride], work.gone[:stride]
    for c in range(stride):
        near[c] = keys.FAR if c < n else keys.NEVER
        parent[c] = n
    v = np.int32(0)
    for m in range(n - 1):
        near[v] = keys.NEVER  # none is closer, so it never changes again
        inside[v] = keys.FAR
        reach_from(v, work.square[v * stride : (v + 1) * stride], near, parent)
        smallest = smallest_present(near, inside)
        best = keys.first_index_of(near, smallest)
        if count_of(near, smallest) > 1:
            best = first_edge(n, smallest, best, near, parent)
        work.merges[0, m] = smallest
        work.merges[1, m] = min(best, parent[best])
        work.merges[2, m] = max(best, parent[best])
        v = np.int32(best)
    return n - 1
