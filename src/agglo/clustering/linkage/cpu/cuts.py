"""From the merges recorded of one image to its groups: which of them count, and labels by first member."""

from __future__ import annotations

import numpy as np

from agglo.clustering.kernels import inner
from agglo.clustering.linkage.cpu.keys import FAR, PER_MERGE


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
def unite_first(key, sorted_keys, recorded, target, limit, work):
    """Groups in work.parent after the first `target` recorded merges in key order that lie within the limit.

    Returns the key of the last of them.
    """
    one, two = work.merges[1], work.merges[2]
    parent, codes = work.parent, work.codes
    n = parent.shape[0]
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
def is_close(keys, last, recorded, limit, deepest, left):
    """Whether rounding may have decided which merges come first, or which lie within the limit."""
    units = np.int64(4 * PER_MERGE * deepest)  # how far apart keys may be in doubt
    at = np.int64(limit) if limit != FAR else np.int64(last)
    close = 0
    for m in range(recorded):
        close += abs(np.int64(keys[m]) - at) <= units
    return close > (0 if limit != FAR else 1) or np.int64(left) - at <= units


@inner
def number_groups(parent, labels):
    """Write labels (N,) from the parents of tokens, none of which stands after its child."""
    count = 0
    for i in range(labels.shape[0]):
        if parent[i] == i:
            labels[i] = count
            count += 1
        else:
            labels[i] = labels[parent[i]]
