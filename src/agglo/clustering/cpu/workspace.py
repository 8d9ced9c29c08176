"""The scratch memory one image is clustered in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from agglo.clustering.cpu.jit import kernel
from agglo.clustering.cpu.keys import FAR

PAD = 32
_APART = 32  # numbers between what two threads write, lest they fight over a cache line


@kernel
def padded(n):
    """Keys a line takes up: an odd number of vector steps, as lines a power of two apart would share cache sets."""
    return ((n + PAD - 1) // PAD | 1) * PAD


class Workspace(NamedTuple):
    """Scratch for one image of N tokens; nothing in it is read before it is written."""

    packed: np.ndarray  # (2, N * (N + 1) / 2) int32: the matrix before and after a round
    row: np.ndarray  # (2, N) int64: where their rows are
    nearest: np.ndarray  # (parts, padded N) int32: key of each group's nearest neighbour, as far as this part saw
    neighbour: np.ndarray  # (parts, padded N) int32: which group that is
    first: np.ndarray  # (N,) int32: first token of each group
    size: np.ndarray  # (N,) float32
    kept: np.ndarray  # (2, N) uint32: the one or two old groups that make up each new group
    share: np.ndarray  # (2, N) float32: their shares of its size
    joined: np.ndarray  # (3, N) uint32: new groups made of two, and the two
    joined_share: np.ndarray  # (2, N) float32
    lines: np.ndarray  # (parts, 3, N) int32: temporary rows
    merges: np.ndarray  # (3, N) int32: key, first token, second token of every merge recorded
    parent: np.ndarray  # (N,) int64: a token of the same group, nearer to the group's first
    codes: np.ndarray  # (N,) int64
    square: np.ndarray  # (N * padded N,) int32: the symmetric matrix, when pairs merge one at a time
    gone: np.ndarray  # (padded N,) int32: FAR for groups merged into another one, otherwise below every key
    encoded: np.ndarray  # (N, N) int32: keys of the distances, where their bits do not serve (negative ones)
    is_encoded: np.ndarray  # (1,) bool: whether these are in use
    asymmetric: np.ndarray  # (parts,) bool: whether a part found the halves of the matrix to differ
    # Average linkage only, see `certainty`:
    depth: np.ndarray  # (N,) int32: roundings each group's keys have gone through, at most
    deepest: np.ndarray  # (1,) int32: the largest of them
    bound: np.ndarray  # (padded N,) int32: keys up to here are too close to a merge of this round
    close: np.ndarray  # (parts,) int64: how many of those a part saw
    in_doubt: np.ndarray  # (1,) bool: whether a merge could not be decided by rounded keys
    left: np.ndarray  # (1,) int32: the smallest key among pairs that are not merged
    # ... and `exact_average`:
    sums: np.ndarray  # (N * padded N,) float64: the sum of all distances between two groups
    heights: np.ndarray  # (N,) float64: of the merges recorded
    order_keys: np.ndarray  # (2, padded N) int64
    absent: np.ndarray  # (padded N,) int64: as `gone`, for 64-bit keys
    counts: np.ndarray  # (padded N,) float64: tokens of each group
    members: np.ndarray  # (2, N) int64: the next member of a token's group; the last member of a first one's


def workspace(n_tokens: int, parts: int = 1, with_matrices: bool = True) -> Workspace:
    """Scratch shared by so many threads; without matrices, `packed`, `square`, `encoded` and `sums` are empty."""

    def ints(*shape: int) -> np.ndarray:
        return np.empty(shape, np.int32)

    def floats(*shape: int) -> np.ndarray:
        return np.empty(shape, np.float32)

    n = n_tokens
    lines = padded(n)
    most = n if with_matrices else 0  # groups that a matrix has room for
    return Workspace(
        packed=ints(2, most * (most + 1) // 2),
        row=np.empty((2, n), np.int64),
        nearest=ints(parts, lines + _APART),
        neighbour=ints(parts, lines + _APART),
        first=ints(n),
        size=floats(n),
        kept=np.empty((2, n), np.uint32),
        share=floats(2, n),
        joined=np.empty((3, n), np.uint32),
        joined_share=floats(2, n),
        lines=ints(parts, 3, n + _APART),
        merges=ints(3, n),
        parent=np.empty(n, np.int64),
        codes=np.empty(n, np.int64),
        square=ints(most * lines),
        gone=ints(lines),
        encoded=ints(most, most),
        is_encoded=np.zeros(1, np.bool_),
        asymmetric=np.zeros(parts, np.bool_),
        depth=ints(n),
        deepest=np.zeros(1, np.int32),
        bound=ints(lines),
        close=np.zeros(parts, np.int64),
        in_doubt=np.zeros(1, np.bool_),
        left=ints(1),
        sums=np.empty(most * lines),
        heights=np.empty(n),
        order_keys=np.empty((2, lines), np.int64),
        absent=np.empty(lines, np.int64),
        counts=np.empty(lines),
        members=np.empty((2, n), np.int64),
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
        work.row[0, a] = a * n
