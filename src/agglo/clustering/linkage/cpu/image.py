"""One image: which of the ways to merge is taken.

Average and complete linkage are reducible (a merge never brings the merged group closer to a third one than the nearer
of its parts was), so merges may be recorded out of order and sorted at the end by (distance, first token, second
token): that is the order in which one-at-a-time merging would have done them, ties included (see
`linkage/reference.py`). Recording stops when enough merges are certain: no pair that is left comes before them.

Large images start with rounds. When few merges are missing, pairs merge one at a time; when rounds merge few groups (in
the worst case one pair), chains bound the work by O(N^2).

A group stands where its first member stands; of equally near groups the first one is the nearest.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner, kernel
from agglo.clustering.keys import smallest_key
from agglo.clustering.linkage.cpu.pairs import look_around, merge_closest_pairs, mirror
from agglo.clustering.linkage.cpu.rounds import (
    certain_merges,
    find_nearest,
    join_parts,
    lay_out_rows,
    plan_round,
    write_round,
)
from agglo.clustering.linkage.cpu.workspace import Workspace, start
from agglo.clustering.threads import run

# Which way on, by estimated nanoseconds; measured on 2 cores of a Xeon (Sapphire Rapids), see `agglo bench clustering`.
_ROUND_ROW, _ROUND_KEY = 150.0, 0.4
_PAIR, _PAIR_KEY, _PAIR_CACHE_MISS = 150.0, 1.5, 0.0022
_MIRROR_KEY = 0.7
_ROUNDS_AHEAD = 2.5  # rounds to come, in units of the next one: each is cheaper than the one before
_ROUND_PAYS_FROM = 20  # a round is worth its passes while it merges at least one group in so many


@kernel
def pairs_are_cheaper(n, missing, parts):
    """Pairs merge on one thread, rounds on all that share the image."""
    by_pairs = missing * (_PAIR + _PAIR_KEY * n + _PAIR_CACHE_MISS * n * n) + _MIRROR_KEY * n * n
    by_rounds = _ROUNDS_AHEAD * n * (_ROUND_ROW + _ROUND_KEY * n) / parts
    return by_pairs < by_rounds


@kernel
def rounds_pay(n, n_joined):
    return n_joined * _ROUND_PAYS_FROM >= n


@kernel
def finish(flat, row, n, target, certain, limit, average, recorded, work):
    """Record what is missing by pairs when rounds do not pay (any more), or leave it to `chains` if those do less."""
    smallest = mirror(flat, row, n, work)
    missing = target - certain
    if smallest < 0 or not (missing * 2 < n or pairs_are_cheaper(n, missing, 1)):
        work.in_doubt[0] = True
        return recorded
    if recorded == 0:
        for a in range(n):
            look_around(n, a, work)
    return merge_closest_pairs(n, target, limit, average, recorded, work)


@inner
def merge_image(distances, target, limit, average, work):
    """Record merges of one (N, N) matrix until `target` of them are certain, or all within the limit are among them.

    Returns the merges recorded. They may be too few: work.in_doubt then says that `chains` must go on from there.
    """
    n = distances.shape[0]
    start(n, work)
    keys = distances.view(np.int32)
    flat, row, side = keys.reshape(-1), work.row[0], 1
    certain = recorded = 0
    pays = not pairs_are_cheaper(n, target, 1)
    if pays:
        find_nearest(0, 1, keys, work)
        if smallest_key(work.nearest[0, :n]) < 0:  # the bits of negative distances are no keys
            work.in_doubt[0] = True
            return 0
    while pays:
        before, checked = recorded, average and work.deepest[0] > 0
        m, n_joined, recorded = plan_round(n, limit, recorded, work)
        lay_out_rows(m, work.row[side])
        write_round(0, 1, flat, row, n, m, n_joined, average, checked, work.packed[side], work.row[side], work)
        if checked and work.close[0] != n_joined:
            work.in_doubt[0] = True
            return before
        flat, row, side, n = work.packed[side], work.row[side], 1 - side, m
        certain, smallest = certain_merges(n, recorded, work)
        if certain >= target or smallest > limit or n == 1:
            work.left[0] = smallest
            return recorded
        pays = rounds_pay(n, n_joined) and not pairs_are_cheaper(n, target - certain, 1)
    return finish(flat, row, n, target, certain, limit, average, recorded, work)


def merge_on_threads(
    distances: np.ndarray, target: int, limit: np.int32, average: bool, parts: int, work: Workspace
) -> int:
    """`merge_image` with the rows of every round of one large image spread over so many threads."""
    n = distances.shape[0]
    start(n, work)
    keys = distances.view(np.int32)
    flat, row, side = keys.reshape(-1), work.row[0], 1
    certain = recorded = 0
    pays = not pairs_are_cheaper(n, target, parts)
    if pays:
        run(find_nearest, parts, keys, work)
        join_parts(n, parts, work)
        if work.nearest[0, :n].min() < 0:
            work.in_doubt[0] = True
            return 0
    while pays:
        before, checked = recorded, average and work.deepest[0] > 0
        m, n_joined, recorded = plan_round(n, limit, recorded, work)
        out, out_row = work.packed[side], work.row[side]
        lay_out_rows(m, out_row)
        run(write_round, parts, flat, row, n, m, n_joined, average, checked, out, out_row, work)
        if checked and work.close.sum() != n_joined:
            work.in_doubt[0] = True
            return before
        join_parts(m, parts, work)
        flat, row, side, n = out, out_row, 1 - side, m
        certain, smallest = certain_merges(n, recorded, work)
        if certain >= target or smallest > limit or n == 1:
            work.left[0] = smallest
            return recorded
        pays = rounds_pay(n, n_joined) and not pairs_are_cheaper(n, target - certain, parts)
    finished: int = finish(flat, row, n, target, certain, limit, average, recorded, work)
    return finished
