"""Average linkage on rounded keys: which decisions are safe from rounding, and which are not.

The rule of `linkage/reference.py` compares exact means. Keys hold means in float32, rounded anew at every merge, which
takes half the time of exact sums at 196 tokens and an eighth at 4096 (43 ms against 367). So a merge counts only if it
is certain: neither group has a third one nearly as near, where nearly means that rounding could have made the
difference. Everything else is left to `chains`: of 2000 images of 196 spatial tokens, halved, 10 were. Tied distances
go there as a rule.

How much rounding can do: a mean of two keys is off by at most 3 units in the last place (the share, the product, the
sum), besides what the two were off before. Keys are float bits, so a unit in the last place is a difference of 1.
Nothing is off at the start: the distances given, times weights if there are any, are what the rule is about.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner
from agglo.clustering.linkage.cpu.keys import FAR, NEVER, padded

_PER_MERGE = np.int32(3)


@inner
def raised(key, units):
    return key + units if key < FAR - units else FAR


@inner
def widest(work):
    """How far apart two keys of this image may be in doubt."""
    return np.int32(4) * _PER_MERGE * work.deepest[0]


@inner
def bound_of(key, i, j, work):
    """A third group nearer than this to i or j leaves it in doubt whether they are each other's nearest."""
    deeper = max(work.depth[i], work.depth[j])
    return raised(key, _PER_MERGE * (work.depth[i] + work.depth[j] + deeper + work.deepest[0]))


@inner
def deepen(target, i, j, work):
    depth = max(work.depth[i], work.depth[j]) + np.int32(1)
    work.depth[target] = depth
    work.deepest[0] = max(work.deepest[0], depth)


@inner
def count_close_present(x, y, gone, bound):
    count = np.int32(0)
    for b in range(x.shape[0]):
        count += np.int32(max(min(x[b], y[b]), gone[b]) <= bound)
    return count


@inner
def is_certain_pair(n, i, j, work):
    """Whether groups i and j of the square matrix are each other's nearest beyond rounding."""
    stride = padded(n)
    x, y = work.square[i * stride : (i + 1) * stride], work.square[j * stride : (j + 1) * stride]
    # The two find each other, once in each line.
    return count_close_present(x, y, work.gone[:stride], bound_of(x[j], i, j, work)) == 2


@inner
def note_bounds(n, limit, work):
    """Write work.bound for the mutual nearest neighbours within the limit, which are about to merge."""
    nearest, neighbour = work.nearest[0], work.neighbour[0]
    for i in range(n):
        j = neighbour[i]
        merges = neighbour[j] == i and nearest[i] <= limit
        work.bound[i] = bound_of(nearest[i], i, j, work) if merges else NEVER


@inner
def count_close(line, bounds, bound):
    """How many keys are within the bound of either of their groups; a pair that merges is one of them."""
    count = np.int32(0)
    for b in range(line.shape[0]):
        count += np.int32(line[b] <= max(bounds[b], bound))
    return count
