"""From the merges recorded of one image to its labels or its tree, after chains of nearest neighbours where in doubt.

Chains take exact numbers, in O(N^2) for any data. Slower than rounds and pairs, they go on from the merges recorded
where rounding leaves average linkage in doubt (see `keys`), where distances are negative, and where rounds and pairs
merge too few groups at a time. Groups compare by the rule of `linkage/reference.py` to the letter. From any group step
to its nearest neighbour until two are each other's: they merge, and the chain before them still holds. Every step adds
a group to the chain or merges, so there are at most 3N of O(N) each.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from agglo.clustering.kernels import inner, kernel
from agglo.clustering.linkage.cpu import cuts
from agglo.clustering.linkage.cpu.keys import distance_of, first_index_of, key_of, padded

BEYOND = np.int64(2**63 - 1)  # larger than the key of any number
_BEFORE = np.int64(-(2**63))
_SIGN_TO_MASK = np.int64(63)
_LARGE = np.float64(np.finfo(np.float32).max)
_NOBODY = -1
_FINITE = np.int64(0x7FEFFFFFFFFFFFFF)  # the key of the largest float64 that is not infinite
_padded = inner(padded)

Workspace = namedtuple("Workspace", "merges parent codes first sums heights order_keys absent counts members")


def workspace(merges: np.ndarray) -> Workspace:
    """Return what a thread needs to go on from the merges (3, N) recorded of an image."""
    n = merges.shape[1]
    stride = padded(n)
    return Workspace(
        merges=merges,
        parent=np.empty(n, np.int64),
        codes=np.empty(n, np.int64),
        first=np.empty(n, np.int32),  # first token of each group
        sums=np.empty(n * stride),  # the sum (complete linkage: the maximum) of distances between two groups
        heights=np.empty(n),  # of the merges recorded
        order_keys=np.empty((2, stride), np.int64),
        absent=np.empty(stride, np.int64),  # as `gone` of `pairs`, for 64-bit keys
        counts=np.empty(stride),  # tokens of each group
        members=np.empty((2, n), np.int64),  # the next member of a token's group; the last member of a first one's
    )


@inner
def order_key_of(number):
    """An int64 that sorts like the float64: see `key_of`."""
    bits = np.float64(number + 0.0).view(np.int64)
    return np.int64(bits ^ ((bits >> _SIGN_TO_MASK) & BEYOND))


@inner
def clean(distance):
    """Unchecked input may hold NaN and infinities; sums of them must still compare."""
    if not distance <= _LARGE:
        return _LARGE
    return max(np.float64(distance), -_LARGE)


@inner
def sum_between(distances, one, two, following):
    """The sum of all distances between the groups that begin with tokens one and two."""
    total = np.float64(0)
    i = one
    while i != _NOBODY:
        j = two
        while j != _NOBODY:
            total += clean(distances[min(i, j), max(i, j)])
            j = following[j]
        i = following[i]
    return total


@inner
def replay(distances, recorded, limit, average, work):
    """Exact heights of the merges recorded so far (infinite beyond the limit), and who is in which group then."""
    n = distances.shape[0]
    following, last, count = work.members[0], work.members[1], work.counts
    for i in range(n):
        following[i] = _NOBODY
        last[i] = i
        count[i] = 1
        work.parent[i] = i
    for m in range(recorded):
        one, two = np.int64(work.merges[1, m]), np.int64(work.merges[2, m])
        if average:
            height = sum_between(distances, one, two, following) / (count[one] * count[two])
            following[last[one]] = two
            last[one] = last[two]
            count[one] += count[two]
        else:
            height = clean(distance_of(work.merges[0, m]))
        work.heights[m] = height if key_of(np.float32(height)) <= limit else np.inf
        work.parent[two] = one


@inner
def gather_groups(distances, average, work):
    """Sums or maxima between the groups left, numbered by first member. Returns how many groups there are."""
    n = distances.shape[0]
    number = work.codes
    m = 0
    for i in range(n):
        if work.parent[i] == i:
            number[i] = m
            work.counts[m] = work.counts[i]
            work.first[m] = i
            m += 1
        else:
            number[i] = number[work.parent[i]]  # the parent of a first member stands before it
    stride = _padded(m)
    nothing = np.float64(0) if average else -np.inf
    for a in range(m * stride):
        work.sums[a] = nothing
    for i in range(n):
        line = work.sums[number[i] * stride : (number[i] + 1) * stride]
        for j in range(i + 1, n):
            if average:
                line[number[j]] += clean(distances[i, j])
            else:
                line[number[j]] = max(line[number[j]], clean(distances[i, j]))
    for a in range(m):
        for b in range(a + 1, m):
            one, two = work.sums[a * stride + b], work.sums[b * stride + a]
            between = one + two if average else max(one, two)
            work.sums[a * stride + b] = between
            work.sums[b * stride + a] = between
    for a in range(stride):
        work.absent[a] = _BEFORE if a < m else BEYOND
        if a >= m:
            work.counts[a] = 1
    return m


@inner
def smallest_quotient(line, counts, own_count, absent, keys):
    smallest = BEYOND
    for b in range(line.shape[0]):
        keys[b] = max(order_key_of(line[b] / (own_count * counts[b])), absent[b])
    for b in range(line.shape[0]):
        smallest = min(smallest, keys[b])
    return smallest


@kernel
def finish_by_chains(distances, recorded, limit, average, work):
    """Exact heights of the recorded merges, and all that follow within the limit. Returns the merges recorded.

    For complete linkage the counts of all groups stay 1, so that quotients are the maxima themselves.
    """
    replay(distances, recorded, limit, average, work)
    if recorded == distances.shape[0] - 1:
        return recorded
    m = gather_groups(distances, average, work)
    stride = _padded(m)
    keys, absent, counts, chain = work.order_keys[0, :stride], work.absent[:stride], work.counts[:stride], work.codes
    length = 0
    begin = 0
    while True:
        if length == 0:
            while begin < m and absent[begin] == BEYOND:
                begin += 1
            if begin == m:
                return recorded
            chain[0] = begin
            length = 1
        tip = chain[length - 1]
        line = work.sums[tip * stride : (tip + 1) * stride]
        absent[tip] = BEYOND
        smallest = smallest_quotient(line, counts, counts[tip], absent, keys)
        absent[tip] = _BEFORE
        other = np.int64(first_index_of(keys, smallest))
        height = line[other] / (counts[tip] * counts[other])
        if smallest == BEYOND or key_of(np.float32(height)) > limit:
            # Heights fall along a chain, so only its first group can be this far from all others.
            absent[tip] = BEYOND
            length = 0
        elif length > 1 and chain[length - 2] == other:
            i, j = min(tip, other), max(tip, other)
            work.heights[recorded] = height
            work.merges[1, recorded] = work.first[i]
            work.merges[2, recorded] = work.first[j]
            recorded += 1
            x = work.sums[i * stride : (i + 1) * stride]
            y = work.sums[j * stride : (j + 1) * stride]
            for p in range(stride):
                x[p] = x[p] + y[p] if average else max(x[p], y[p])
            for p in range(m):
                work.sums[p * stride + i] = x[p]
            if average:
                counts[i] += counts[j]
            absent[j] = BEYOND
            length -= 2
        else:
            chain[length] = other
            length += 1


@kernel
def label_after_chains(recorded, target, labels, work):
    """Write labels (N,) after the first `target` recorded merges of those whose height is finite."""
    for m in range(recorded):
        work.order_keys[0, m] = order_key_of(work.heights[m])
    cuts.unite_first(work.order_keys[0], work.order_keys[1], recorded, target, _FINITE, work)
    cuts.number_groups(work.parent, labels)


@kernel
def tree_rows(order, heights, rows, work):
    """Linkage rows (N-1, 4) in SciPy's layout from the recorded merges in the given order."""
    n = order.shape[0] + 1
    parent, node, size = work.parent, work.codes, work.first
    for i in range(n):
        parent[i] = i
        node[i] = i
        size[i] = 1
    for r in range(n - 1):
        m = order[r]
        x, y = cuts.root_of(parent, work.merges[1, m]), cuts.root_of(parent, work.merges[2, m])
        x, y = min(x, y), max(x, y)
        parent[y] = x
        size[x] += size[y]
        rows[r, 0] = min(node[x], node[y])
        rows[r, 1] = max(node[x], node[y])
        rows[r, 2] = heights[m]
        rows[r, 3] = size[x]
        node[x] = n + r
