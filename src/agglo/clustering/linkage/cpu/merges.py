"""From the merges recorded of one image to its labels, or to rows of a tree."""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner, kernel
from agglo.clustering.linkage.cpu.chains import finish_by_chains, order_key_of
from agglo.clustering.linkage.cpu.keys import FAR, widest

_FINITE = np.int64(0x7FEFFFFFFFFFFFFF)  # the key of the largest float64 that is not infinite


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
    keys, units = work.merges[0], np.int64(widest(work))
    at = np.int64(limit) if limit != FAR else np.int64(last)
    close = 0
    for m in range(recorded):
        close += abs(np.int64(keys[m]) - at) <= units
    return close > (0 if limit != FAR else 1) or np.int64(work.left[0]) - at <= units


@inner
def number_by_first(parent, labels):
    count = 0
    for i in range(labels.shape[0]):
        if parent[i] == i:
            labels[i] = count
            count += 1
        else:
            labels[i] = labels[parent[i]]


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
    number_by_first(work.parent, labels)


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
