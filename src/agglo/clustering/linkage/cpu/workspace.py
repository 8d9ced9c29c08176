"""The scratch memory one image is clustered in."""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from agglo.clustering.jit import kernel
from agglo.clustering.keys import FAR

_PAD = 32
_APART = 32  # numbers between what two threads write, lest they fight over a cache line

Workspace = namedtuple(
    "Workspace",
    "square other nearest neighbour first size kept joined joined_share lines merges parent codes gone in_doubt depth "
    "deepest bound close left sums heights order_keys absent counts members",
)


@kernel
def padded(n):
    """Keys a line takes up: an odd number of vector steps, as lines a power of two apart would share cache sets."""
    return ((n + _PAD - 1) // _PAD | 1) * _PAD


def workspace(n: int, parts: int = 1) -> Workspace:
    """Scratch for an image of N tokens, shared by so many threads; nothing in it is read before it is written."""

    def ints(*shape: int) -> np.ndarray:
        return np.empty(shape, np.int32)

    lines = padded(n)
    return Workspace(
        square=ints(n * lines),  # the symmetric matrix, when pairs merge one at a time; else the matrix after a round
        other=ints(n * n),  # the matrix after every other round
        nearest=ints(parts, lines + _APART),  # key of each group's nearest neighbour, as far as this part saw
        neighbour=ints(parts, lines + _APART),  # which group that is
        first=ints(n),  # first token of each group
        size=np.empty(n, np.float32),  # tokens of each group
        kept=np.empty((2, n), np.uint32),  # the one or two old groups that make up each new group
        joined=np.empty((3, n), np.uint32),  # new groups made of two, and the two
        joined_share=np.empty((2, n), np.float32),  # the shares of the two in its size
        lines=ints(parts, 3, n + _APART),  # temporary rows
        merges=ints(3, n),  # key, first token, second token of every merge recorded
        parent=np.empty(n, np.int64),  # a token of the same group, nearer to the group's first
        codes=np.empty(n, np.int64),
        gone=ints(lines),  # FAR for groups merged into another one, otherwise below every key
        in_doubt=np.zeros(1, np.bool_),  # whether `chains` must go on from the merges recorded
        # Average linkage only, see `certainty`:
        depth=ints(n),  # roundings each group's keys have gone through, at most
        deepest=np.zeros(1, np.int32),  # the largest of them
        bound=ints(lines),  # keys up to here are too close to a merge of this round
        close=np.zeros(parts, np.int64),  # how many of those a part saw
        left=ints(1),  # the smallest key among pairs that are not merged
        # `chains` only:
        sums=np.empty(n * lines),  # the sum (complete linkage: the maximum) of distances between two groups
        heights=np.empty(n),  # of the merges recorded
        order_keys=np.empty((2, lines), np.int64),
        absent=np.empty(lines, np.int64),  # as `gone`, for 64-bit keys
        counts=np.empty(lines),  # tokens of each group
        members=np.empty((2, n), np.int64),  # the next member of a token's group; the last member of a first one's
    )


@kernel
def start(n, work):
    work.deepest[0] = 0
    work.in_doubt[0] = False
    work.left[0] = FAR
    for a in range(n):
        work.depth[a] = 0
        work.first[a] = a
        work.size[a] = 1
