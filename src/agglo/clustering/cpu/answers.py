"""From the merges recorded for an image to its labels or its tree."""

from __future__ import annotations

import numpy as np

from agglo.clustering.cpu.image import record_merges
from agglo.clustering.cpu.jit import jit, jit_leaf
from agglo.clustering.cpu.lines import FAR, distance_of


@jit_leaf
def root_of(parent, i):
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@jit
def number_groups(merges, recorded, target, limit, labels):
    """Labels (N,) after the first `target` merges in key order that lie within the limit."""
    n = labels.shape[0]
    key, one, two = merges[0], merges[1], merges[2]
    target = min(target, recorded)
    last = FAR if target == 0 else np.partition(key[:recorded], target - 1)[target - 1]
    parent = np.arange(n)
    ties = np.empty(recorded, np.int64)
    n_ties = 0
    if target > 0:
        for m in range(recorded):
            if key[m] > limit or key[m] > last:
                continue
            if key[m] == last:
                ties[n_ties] = np.int64(one[m]) * n + two[m]
                n_ties += 1
            else:
                x, y = root_of(parent, one[m]), root_of(parent, two[m])
                parent[max(x, y)] = min(x, y)
                target -= 1
        ties = ties[:n_ties]
        if n_ties > target:
            ties.sort()
        for tie in ties[:target]:
            x, y = root_of(parent, tie // n), root_of(parent, tie % n)
            parent[max(x, y)] = min(x, y)
    count = 0
    for i in range(n):
        if parent[i] == i:
            labels[i] = count
            count += 1
        else:
            labels[i] = labels[parent[i]]


@jit
def tree_rows(merges, order, rows):
    """Linkage rows (N-1, 4) in SciPy's layout from merges in the given order."""
    n = order.shape[0] + 1
    parent = np.arange(n)
    node = np.arange(n)
    size = np.ones(n, np.int64)
    for r in range(n - 1):
        m = order[r]
        x, y = root_of(parent, merges[1, m]), root_of(parent, merges[2, m])
        x, y = min(x, y), max(x, y)
        parent[y] = x
        size[x] += size[y]
        rows[r, 0] = min(node[x], node[y])
        rows[r, 1] = max(node[x], node[y])
        rows[r, 2] = distance_of(merges[0, m])
        rows[r, 3] = size[x]
        node[x] = n + r


@jit
def label_images(distances, begin, end, k, limit, single, average, labels, work):
    """Labels (B, N) of images begin..end of distances (B, N, N), for k (B,) groups or all merges within the limit."""
    n = distances.shape[1]
    for b in range(begin, end):
        target = n - k[b]
        recorded = record_merges(distances[b], target, limit, single, average, work) if target > 0 else 0
        number_groups(work.merges, recorded, target, limit, labels[b])
