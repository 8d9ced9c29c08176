"""Average linkage on exact sums: slower than rounded keys, and right where those leave a doubt (see `certainty`).

The rule of reference.py to the letter: two groups compare by the float64 quotient of the sum of their distances and the
number of pairs. Chains of nearest neighbours build what is missing of the tree in O(N^2).
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.cpu.jit import inner, kernel
from agglo.clustering.cpu.keys import first_index_of, key_of
from agglo.clustering.cpu.workspace import padded

BEYOND = np.int64(2**63 - 1)  # larger than the key of any number
_BEFORE = np.int64(-(2**63))
_SIGN_TO_MASK = np.int64(63)
_LARGE = np.float64(1e38)
_NOBODY = -1


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
def replay(distances, recorded, limit, work):
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
        height = sum_between(distances, one, two, following) / (count[one] * count[two])
        work.heights[m] = height if key_of(np.float32(height)) <= limit else np.inf
        following[last[one]] = two
        last[one] = last[two]
        count[one] += count[two]
        work.parent[two] = one


@inner
def gather_groups(distances, work):
    """Sums between the groups left, numbered by first member. Returns how many groups there are."""
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
    stride = padded(m)
    for a in range(m * stride):
        work.sums[a] = 0
    for i in range(n):
        line = work.sums[number[i] * stride : (number[i] + 1) * stride]
        for j in range(i + 1, n):
            line[number[j]] += clean(distances[i, j])
    for a in range(m):
        for b in range(a + 1, m):
            total = work.sums[a * stride + b] + work.sums[b * stride + a]
            work.sums[a * stride + b] = total
            work.sums[b * stride + a] = total
    for a in range(stride):
        work.absent[a] = _BEFORE if a < m else BEYOND
        if a >= m:
            work.counts[a] = 1
    return m


@inner
def smallest_mean(line, counts, own_count, absent, keys):
    smallest = BEYOND
    for b in range(line.shape[0]):
        keys[b] = max(order_key_of(line[b] / (own_count * counts[b])), absent[b])
    for b in range(line.shape[0]):
        smallest = min(smallest, keys[b])
    return smallest


@inner
def add_into(x, y):
    for b in range(x.shape[0]):
        x[b] += y[b]


@kernel
def finish_exactly(distances, recorded, limit, work):
    """Exact heights of the recorded merges, and all that follow within the limit. Returns the merges recorded."""
    replay(distances, recorded, limit, work)
    if recorded == distances.shape[0] - 1:
        return recorded
    m = gather_groups(distances, work)
    stride = padded(m)
    keys, absent, counts, chain = work.order_keys[0, :stride], work.absent[:stride], work.counts[:stride], work.codes
    length = 0
    begin = 0
    isolated = work.kept[1]
    for a in range(m):
        isolated[a] = 0
    while True:
        if length == 0:
            while begin < m and (absent[begin] == BEYOND or isolated[begin] == 1):
                begin += 1
            if begin == m:
                return recorded
            chain[0] = begin
            length = 1
        tip = chain[length - 1]
        line = work.sums[tip * stride : (tip + 1) * stride]
        absent[tip] = BEYOND
        smallest = smallest_mean(line, counts, counts[tip], absent, keys)
        absent[tip] = _BEFORE
        other = np.int64(first_index_of(keys, smallest))
        if smallest == BEYOND:
            isolated[tip] = 1
            length = 0
            continue
        height = line[other] / (counts[tip] * counts[other])
        if key_of(np.float32(height)) > limit:
            isolated[tip] = 1
            length = 0
        elif length > 1 and chain[length - 2] == other:
            i, j = min(tip, other), max(tip, other)
            work.heights[recorded] = height
            work.merges[1, recorded] = work.first[i]
            work.merges[2, recorded] = work.first[j]
            recorded += 1
            x = work.sums[i * stride : (i + 1) * stride]
            add_into(x, work.sums[j * stride : (j + 1) * stride])
            for p in range(m):
                work.sums[p * stride + i] = x[p]
            counts[i] += counts[j]
            absent[j] = BEYOND
            length -= 2
        else:
            chain[length] = other
            length += 1


@kernel
def write_order_keys(recorded, work):
    for m in range(recorded):
        work.order_keys[0, m] = order_key_of(work.heights[m])
