"""From the merges recorded of one image to its labels or its tree, after chains of nearest neighbours where in doubt.

Chains take exact numbers, in O(N^2) for any data. Slower than rounds and pairs, they go on from the merges recorded
where rounding leaves average linkage in doubt (see `keys`), where distances are negative, and where rounds and pairs
merge too few groups at a time. Groups compare by the rule of `linkage/reference.py` to the letter. From any group step
to its nearest neighbour until two are each other's: they merge, and the chain before them still holds. Every step adds
a group to the chain or merges, so there are at most 3N of O(N) each.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner, kernel
from agglo.clustering.linkage.cpu.keys import FAR, PER_MERGE, distance_of, first_index_of, key_of, padded

BEYOND = np.int64(2**63 - 1)  # larger than the key of any number
_BEFORE = np.int64(-(2**63))
_SIGN_TO_MASK = np.int64(63)
_LARGE = np.float64(np.finfo(np.float32).max)
_NOBODY = -1
_FINITE = np.int64(0x7FEFFFFFFFFFFFFF)  # the key of the largest float64 that is not infinite


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
    stride = padded(m)
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
    stride = padded(m)
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


@inner
def root_of(parent, i):
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@inner
def kth_smallest(values, count, kth):
    """The kth (from 0) of values[:count] in ascending order, which it reorders: Hoare's selection."""
    low, high = 0, count - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if kth <= j:
            high = j
        elif kth >= i:
            low = i
        else:
            break
    return values[kth]


@inner
def unite(parent, one, two):
    x, y = root_of(parent, one), root_of(parent, two)
    parent[max(x, y)] = min(x, y)


@inner
def unite_first(key, sorted_keys, recorded, target, limit, n, work):
    """Groups in work.parent after the first `target` recorded merges in key order that lie within the limit.

    Returns the key of the last of them.
    """
    one, two = work.merges[1], work.merges[2]
    parent, codes = work.parent, work.codes
    last = key[0]
    for i in range(n):
        parent[i] = i
    target = min(target, recorded)
    if target > 0:
        for m in range(recorded):
            sorted_keys[m] = key[m]
        last = kth_smallest(sorted_keys, recorded, target - 1)
        ties = 0
        for m in range(recorded):
            if key[m] <= limit and key[m] < last:
                unite(parent, one[m], two[m])
                target -= 1
            elif key[m] <= limit and key[m] == last:
                codes[ties] = np.int64(one[m]) * n + two[m]
                ties += 1
        if ties > 0:
            last_tie = kth_smallest(codes, ties, min(target, ties) - 1)
            for t in range(ties):
                if codes[t] <= last_tie:
                    unite(parent, codes[t] // n, codes[t] % n)
    return last


@inner
def cut_is_close(last, recorded, target, limit, work):
    """Whether rounding may have decided which merges come first, or which lie within the limit."""
    if work.deepest[0] == 0 or target <= 0:
        return False
    keys, units = work.merges[0], np.int64(4 * PER_MERGE * work.deepest[0])  # how far apart keys may be in doubt
    at = np.int64(limit) if limit != FAR else np.int64(last)
    close = 0
    for m in range(recorded):
        close += abs(np.int64(keys[m]) - at) <= units
    return close > (0 if limit != FAR else 1) or np.int64(work.left[0]) - at <= units


@kernel
def number_groups(distances, recorded, target, limit, average, labels, work):
    """Write the labels (N,) of an (N, N) matrix after the first `target` recorded merges that lie within the limit."""
    n = labels.shape[0]
    last = unite_first(work.merges[0], work.lines[0, 0], recorded, target, limit, n, work)
    close = average and cut_is_close(last, recorded, target, limit, work)
    if close or work.in_doubt[0]:
        recorded = finish_by_chains(distances, recorded, limit, average, work)
        for m in range(recorded):
            work.order_keys[0, m] = order_key_of(work.heights[m])
        unite_first(work.order_keys[0], work.order_keys[1], recorded, target, _FINITE, n, work)
    count, parent = 0, work.parent
    for i in range(n):
        if parent[i] == i:
            labels[i] = count
            count += 1
        else:
            labels[i] = labels[parent[i]]


@kernel
def tree_rows(order, heights, rows, work):
    """Linkage rows (N-1, 4) in SciPy's layout from the recorded merges in the given order."""
    n = order.shape[0] + 1
    parent, node, size = work.parent, work.codes, work.kept[0]
    for i in range(n):
        parent[i] = i
        node[i] = i
        size[i] = 1
    for r in range(n - 1):
        m = order[r]
        x, y = root_of(parent, work.merges[1, m]), root_of(parent, work.merges[2, m])
        x, y = min(x, y), max(x, y)
        parent[y] = x
        size[x] += size[y]
        rows[r, 0] = min(node[x], node[y])
        rows[r, 1] = max(node[x], node[y])
        rows[r, 2] = heights[m]
        rows[r, 3] = size[x]
        node[x] = n + r
