"""Distances as integer keys, and the loops over lines of them that LLVM turns into vector instructions.

A key is an int32 that sorts like the float32 it encodes. LLVM vectorises the minimum of integers, not that of floats
(10x here), and no fast-math flag is needed, so NaN stays detectable. Distances that are not negative are their own
keys, bit by bit.

Indices that address memory are unsigned where it matters: Numba tests signed ones for negative values, which stops
vectorisation.

Average linkage compares exact means, but keys hold means in float32, rounded anew at every merge: half the time of
exact sums at 196 tokens, an eighth at 4096. So a merge counts only if it is certain: rounding could not have brought a
third group nearer than either of the two. The rest is left to `chains`: 10 of 2000 images of 196 spatial tokens, and
tied distances as a rule. A mean of two keys is off by at most 3 units in the last place (the share, the product,
the sum), besides what the two were off before. Keys are float bits, so such a unit is a difference of 1.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.kernels import inner

FAR = np.int32(2**31 - 1)  # larger than the key of any finite distance
NEVER = np.int32(-(2**31))  # smaller than any
MAGNITUDE = np.int32(0x7FFFFFFF)
_SIGN_TO_MASK = np.int32(31)
PAD = 32  # keys that a vector loop takes in one step, or several
PER_MERGE = np.int32(3)  # units in the last place


def padded(n):
    """Keys a line takes up: an odd number of vector steps, as lines a power of two apart would share cache sets."""
    return ((n + PAD - 1) // PAD | 1) * PAD


def encode(distance):
    bits = np.float32(distance + np.float32(0)).view(np.int32)  # + 0 makes -0.0 the same key as 0.0
    return np.int32(bits ^ ((bits >> _SIGN_TO_MASK) & MAGNITUDE))


key_of = inner(encode)


@inner
def distance_of(key):
    return np.int32(key ^ ((key >> _SIGN_TO_MASK) & MAGNITUDE)).view(np.float32)


@inner
def smallest_key(line):
    smallest = FAR
    for b in range(line.shape[0]):
        smallest = min(smallest, line[b])
    return smallest


@inner
def first_index_of(line, key):
    n = np.int32(line.shape[0])
    found = n
    for b in range(line.shape[0]):
        candidate = np.int32(b) if line[b] == key else n
        found = min(found, candidate)
    return found


# These write over their first argument because LLVM tells by addresses at run time whether arrays overlap, and takes
# the scalar loop where they do.


@inner
def average_in_place(x, y, share_x, share_y):
    for b in range(x.shape[0]):
        mean = key_of(share_x * distance_of(x[b]) + share_y * distance_of(y[b]))
        x[b] = max(mean, min(x[b], y[b]))  # rounding must not bring a merged group closer than its parts


@inner
def averages_in_place(x, y, share_x, share_y):
    for b in range(x.shape[0]):
        mean = key_of(share_x[b] * distance_of(x[b]) + share_y[b] * distance_of(y[b]))
        x[b] = max(mean, min(x[b], y[b]))


@inner
def maximum_in_place(x, y):
    for b in range(x.shape[0]):
        x[b] = max(x[b], y[b])


@inner
def copy_into(out, source):
    for b in range(out.shape[0]):
        out[b] = source[b]


@inner
def gather_into(out, source, indices):
    for b in range(out.shape[0]):
        out[b] = source[indices[b]]


@inner
def scatter_into(out, source, indices):
    for b in range(source.shape[0]):
        out[indices[b]] = source[b]


@inner
def bound_of(key, depth_i, depth_j, deepest):
    """A third group nearer than this to i or j leaves it in doubt whether they are each other's nearest."""
    units = PER_MERGE * (depth_i + depth_j + max(depth_i, depth_j) + deepest)
    return key + units if key < FAR - units else FAR


@inner
def count_close(line, bounds, bound):
    """How many keys are within the bound of either of their groups; a pair that merges is one of them."""
    count = np.int32(0)
    for b in range(line.shape[0]):
        count += np.int32(line[b] <= max(bounds[b], bound))
    return count
