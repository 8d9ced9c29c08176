"""One merge after another: the closest pair of groups, or the next edge of a spanning tree for single linkage.

Here the whole symmetric matrix is stored, so that a group's keys are one line. Lines are padded with FAR to a multiple
of what a vector loop takes in one step, because its scalar remainder would cost more than the rest at these lengths.
A group stands where its first member does.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from agglo.clustering.kernels import inner, kernel
from agglo.clustering.linkage.cpu import cuts, keys

STALE = np.int32(-1)
_ZERO, _ONE, _FOUR = np.uint64(0), np.uint64(1), np.uint64(4)

Workspace = namedtuple("Workspace", "square nearest neighbour gone depth size merges parent codes")


def workspace(n: int) -> Workspace:
    """Return what a thread needs for images of N tokens; nothing in it is read before it is written."""
    stride = keys.padded(n)
    return Workspace(
        square=np.empty((n, stride), np.int32),
        nearest=np.empty(stride, np.int32),  # key of each group's nearest neighbour, or of an edge to the tree
        neighbour=np.empty(stride, np.int32),  # which one that is
        gone=np.empty(stride, np.int32),  # FAR for groups merged into another one, otherwise below every key
        depth=np.empty(n, np.int32),  # roundings each group's keys have gone through, at most
        size=np.empty(n, np.float32),  # tokens of each group
        merges=np.empty((3, n), np.int32),  # key, first token, second token of every merge recorded
        parent=np.empty(n, np.int64),  # a token of the same group, nearer to the group's first
        codes=np.empty(n, np.int64),
    )


@inner
def encode_into(keys_of_line, line):
    for b in range(line.shape[0]):
        keys_of_line[b] = keys.key_of(line[b])


@inner
def mirror(matrix, square):
    """Write the keys of the upper triangle of distances (N, N) into both halves of a square with padded lines."""
    n, stride = np.uint64(square.shape[0]), np.uint64(square.shape[1])
    for a in range(_ZERO, n):
        encode_into(square[a, a + _ONE : n], matrix[a, a + _ONE :])
        square[a, a] = keys.FAR
        for b in range(n, stride):
            square[a, b] = keys.FAR
    # In squares of 4 x 4, which stay in registers.
    whole = n - n % _FOUR
    for a in range(_ZERO, whole, _FOUR):
        for b in range(a + _FOUR, whole, _FOUR):
            for i in range(_FOUR):
                for j in range(_FOUR):
                    square[b + j, a + i] = square[a + i, b + j]
        for i in range(a, a + _FOUR):
            for j in range(i + _ONE, a + _FOUR):
                square[j, i] = square[i, j]
    for b in range(whole, n):
        for a in range(_ZERO, b):
            square[b, a] = square[a, b]


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
def look_around(i, work):
    """Find the nearest neighbour of group i again."""
    line = work.square[i]
    key = smallest_present(line, work.gone)
    work.nearest[i] = key
    work.neighbour[i] = first_present(line, work.gone, key)


@inner
def count_near(x, y, gone, bound):
    """How many groups are this near to either of two, whose lines are x and y."""
    count = np.int32(0)
    for b in range(x.shape[0]):
        count += np.int32(max(min(x[b], y[b]), gone[b]) <= bound)
    return count


@kernel
def label_by_pairs(distances, k, limit, average, labels, image, end, work):
    """Label images up to `end`, merging closest pairs: for k (B,) groups, or all merges within the limit.

    A nearest-neighbour key stays a lower bound when that neighbour merges, so a group looks around again only when its
    bound is the smallest of all. Where that happens too often, `chains` must take over.

    Returns the first image that is left to `chains`, or the end, and the merges recorded of it or of the last one.
    """
    square, nearest, neighbour, gone, depth, size = work[:6]
    n, stride = square.shape
    recorded = 0
    for b in range(image, end):
        mirror(distances[b], square)
        for p in range(stride):
            gone[p] = keys.NEVER if p < n else keys.FAR
            nearest[p] = keys.FAR
            neighbour[p] = STALE
        for i in range(n):
            look_around(i, work)
            depth[i] = 0
            size[i] = 1
            work.parent[i] = i
        recorded, patience, deepest = 0, 4 * n, np.int32(0)
        smallest = keys.smallest_key(nearest)
        doubt = smallest < 0  # roundings of negative distances have no bound
        while not doubt and recorded < n - k[b] and smallest <= limit and smallest != keys.FAR:
            i = keys.first_index_of(nearest, smallest)
            j = neighbour[i]
            if j == STALE:
                doubt = patience == 0
                patience -= 1
            else:
                # Columns of groups that are gone keep arbitrary keys.
                x, y = square[i], square[j]
                if average:
                    bound = keys.bound_of(smallest, depth[i], depth[j], deepest)
                    # The two find each other, once in each line.
                    if deepest > 0 and count_near(x, y, gone, bound) != 2:
                        doubt = True
                        break
                    total = size[i] + size[j]
                    keys.average_in_place(x, y, size[i] / total, size[j] / total)
                    size[i] = total
                    depth[i] = max(depth[i], depth[j]) + np.int32(1)
                    deepest = max(deepest, depth[i])
                else:
                    keys.maximum_in_place(x, y)
                work.merges[0, recorded] = smallest
                work.merges[1, recorded] = i
                work.merges[2, recorded] = j
                recorded += 1
                work.parent[j] = i
                x[i] = keys.FAR
                gone[j] = keys.FAR
                nearest[j] = keys.FAR
                for p in range(np.uint64(n)):
                    square[p, np.uint64(i)] = x[p]
                for p in range(stride):
                    neighbour[p] = STALE if neighbour[p] == i or neighbour[p] == j else neighbour[p]
            look_around(i, work)
            smallest = keys.smallest_key(nearest)
        if deepest > 0 and not doubt:
            last = work.merges[0, recorded - 1]
            doubt = cuts.is_close(work.merges[0], last, recorded, limit, deepest, smallest)
        if doubt:
            return b, recorded
        cuts.number_groups(work.parent, labels[b])
    return end, recorded


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
def label_by_spanning_tree(distances, k, limit, labels, image, end, work):
    """Label images up to `end` as `label_by_pairs`, from the minimum spanning tree that Prim's algorithm grows.

    Edges compare by (key, first token, second token), which makes the tree unique. For edges that end in the same token
    that is the order of (key, other token). All N - 1 edges are recorded.
    """
    square, near, parent, inside = work[:4]
    n, stride = square.shape
    for b in range(image, end):
        mirror(distances[b], square)
        for c in range(stride):
            near[c] = keys.FAR if c < n else keys.NEVER
            parent[c] = n
            inside[c] = keys.NEVER if c < n else keys.FAR
        v = np.int32(0)
        for m in range(n - 1):
            near[v] = keys.NEVER  # none is closer, so it never changes again
            inside[v] = keys.FAR
            reach_from(v, square[v], near, parent)
            smallest = smallest_present(near, inside)
            best = keys.first_index_of(near, smallest)
            if count_of(near, smallest) > 1:
                best = first_edge(n, smallest, best, near, parent)
            work.merges[0, m] = smallest
            work.merges[1, m] = min(best, parent[best])
            work.merges[2, m] = max(best, parent[best])
            v = np.int32(best)
        cuts.unite_first(work.merges[0], near, n - 1, n - k[b], limit, work)
        cuts.number_groups(work.parent, labels[b])
