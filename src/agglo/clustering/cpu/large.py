"""One large image: the rows of every round are spread over the threads, and no second matrix of its size is held.

An image's own matrix, measured from features, may be written over. Rounds read only pairs a < b, so the half below the
diagonal is free, and the keys between the groups that a round leaves go there; those of the next round go back above
the diagonal, and so on. Row a of m groups has m - 1 - a keys. Above, it stands in line a of the N x N matrix, right of
the diagonal; below, in line N - 1 - a, from the left:

    above, a at a * N + (a + 1 ...)        below, a at (N - 1 - a) * N + (0 ...)

Once no more than N / 2 groups are left, either layout takes up one half of the lines. The others are then one piece of
memory: further rounds are packed there, which is faster to read, and pairs merge one at a time in there too.

A matrix that a caller gave stays as it was, and two packed triangles are held beside it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from agglo.clustering.cpu.image import finish, pairs_are_cheaper, rounds_pay
from agglo.clustering.cpu.keys import any_negative, encode
from agglo.clustering.cpu.rounds import certain_merges, find_nearest, join_parts, lay_out_rows, plan_round, write_round
from agglo.clustering.cpu.threads import run
from agglo.clustering.cpu.workspace import Workspace, padded, start, workspace


class _Room(Protocol):
    """Where keys between groups are written."""

    def place(self, n: int, m: int, row: np.ndarray) -> np.ndarray:
        """The array for the keys of m groups, made from those of n groups in the place before; writes its `row`."""

    def has_square(self, n: int) -> bool:
        """Whether the symmetric matrix of n groups fits in without more memory."""

    def square(self, n: int) -> np.ndarray:
        """The array for the symmetric matrix of n groups."""


class _Beside:
    """Two packed triangles, in turns."""

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self._side = 0

    def place(self, n: int, m: int, row: np.ndarray) -> np.ndarray:
        self._side = 1 - self._side
        lay_out_rows(m, 0, row)
        packed: np.ndarray = self._work.packed[self._side]
        return packed

    def has_square(self, n: int) -> bool:
        return True  # it is part of the workspace

    def square(self, n: int) -> np.ndarray:
        return self._work.square


class _Within:
    """The matrix of the image itself, (N, N), keys above the diagonal at first."""

    def __init__(self, keys: np.ndarray) -> None:
        self._n = keys.shape[0]
        self._flat = keys.reshape(-1)
        self._above = True  # on which side of the diagonal the keys are; packed: in which half of the lines
        self._packed: list[int] = []  # where the two packed triangles begin, the one to be written first

    def place(self, n: int, m: int, row: np.ndarray) -> np.ndarray:
        if self._packed:
            self._packed.reverse()
        elif self.has_square(n):
            begin = self._free_half()
            self._above = not self._above
            self._packed = [begin, begin + n * (n + 1) // 2]
        if self._packed:
            lay_out_rows(m, self._packed[0], row)
            return self._flat
        self._above = not self._above
        group = np.arange(m)
        row[:m] = group * self._n if self._above else (self._n - 1 - group) * self._n - (group + 1)
        return self._flat

    def has_square(self, n: int) -> bool:
        return 2 * n <= self._n and padded(n) <= self._n

    def square(self, n: int) -> np.ndarray:
        size = n * padded(n)
        if not self.has_square(n):
            return np.empty(size, np.int32)
        begin = self._free_half()
        return self._flat[begin : begin + size]

    def _free_half(self) -> int:
        """Where the half of the lines begins that no keys are in, given that at most N / 2 groups are left."""
        return (self._n - self._n // 2) * self._n if self._above else 0


def merge_large(
    distances: np.ndarray, target: int, limit: np.int32, average: bool, parts: int, *, write_over: bool
) -> tuple[int, Workspace]:
    """`merge_image` of one large image (N, N) on so many threads, in the memory of its distances if those may be
    written over. Returns the merges recorded, and the workspace they are in.

    Where more than N / 2 groups are left and rounds merge few of them, the groups' symmetric matrix is held as well.
    """
    n = distances.shape[0]
    work = workspace(n, parts, with_matrices=not write_over)
    keys = distances.view(np.int32)
    room: _Room = _Within(keys) if write_over else _Beside(work)
    start(n, work)
    pays = not (room.has_square(n) and pairs_are_cheaper(n, target, parts))
    if pays:
        _look_around(keys, parts, work)
    if work.nearest[0, :n].min() < 0 if pays else any_negative(keys):
        if average:
            work.in_doubt[0] = True
            return 0, work
        keys = keys if write_over else work.encoded
        encode(distances, keys)
        work.is_encoded[0] = True
        if pays:
            _look_around(keys, parts, work)
    flat, row, side = keys.reshape(-1), work.row[0], 1
    certain = recorded = 0
    while pays:
        before, checked = recorded, average and work.deepest[0] > 0
        m, n_joined, recorded = plan_round(n, limit, recorded, work)
        out_row = work.row[side]
        out = room.place(n, m, out_row)
        run(write_round, parts, flat, row, n, m, n_joined, average, checked, out, out_row, work)
        if checked and work.close.sum() != n_joined:
            work.in_doubt[0] = True
            return before, work
        join_parts(m, parts, work)
        flat, row, side, n = out, out_row, 1 - side, m
        certain, smallest = certain_merges(n, recorded, work)
        if certain >= target or smallest > limit or n == 1:
            work.left[0] = smallest
            return recorded, work
        # Without room for pairs, another round it is: it costs less than a symmetric matrix alone.
        pays = rounds_pay(n, n_joined) and not (room.has_square(n) and pairs_are_cheaper(n, target - certain, parts))
    in_square = work._replace(square=room.square(n))
    return finish(flat, row, n, target, certain, limit, average, recorded, in_square), work


def _look_around(keys: np.ndarray, parts: int, work: Workspace) -> None:
    run(find_nearest, parts, keys, work)
    join_parts(keys.shape[0], parts, work)
