"""One image: which of the ways to merge is taken, and what its recorded merges say.

Average and complete linkage are reducible (a merge never brings the merged group closer to a third one than the nearer
of its parts was), so merges may be recorded out of order and sorted at the end by (distance, first token, second
token): that is the order in which one-at-a-time merging would have done them, ties included (see reference.py).
Recording stops when enough merges are certain: no pair that is left comes before them.

Large images start with rounds. When few merges are missing, pairs merge one at a time; when rounds merge few pairs (in
the worst case one), chains bound the work by O(n^2).

A group stands where its first member stands; of equally near groups the first one is the nearest.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.cpu.jit import inner, kernel
from agglo.clustering.cpu.keys import NOT_KEYS, encode, smallest_key
from agglo.clustering.cpu.one_at_a_time import follow_chains, look_around, merge_closest_pairs, mirror
from agglo.clustering.cpu.rounds import certain_merges, find_nearest, lay_out_rows, plan_round, write_round
from agglo.clustering.cpu.spanning import spanning_tree
from agglo.clustering.cpu.workspace import start

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
    """Record what is missing when rounds do not pay (any more), by whichever of the two ways does less.

    Without rounds before (nothing recorded), nearest neighbours are found here, and keys may turn out not to be keys.
    """
    smallest = mirror(flat, row, n, work)
    if recorded == 0:
        if smallest < 0 and not work.is_encoded[0]:
            return NOT_KEYS
        for a in range(n):
            look_around(n, a, work)
    enough = False
    if (target - certain) * 2 < n or pairs_are_cheaper(n, target - certain, 1):
        recorded, enough = merge_closest_pairs(n, target, limit, average, recorded, work)
    if not enough and not work.in_doubt[0]:
        recorded = follow_chains(n, limit, average, recorded, work)
    return recorded


@inner
def merge_image(keys, target, limit, average, work):
    """Record merges of one square matrix of keys until `target` of them are certain. Returns the merges recorded."""
    n = keys.shape[0]
    start(n, work)
    flat, row, side = keys.reshape(-1), work.row[0], 1
    certain = recorded = 0
    pays = not pairs_are_cheaper(n, target, 1)
    if pays:
        find_nearest(0, 1, keys, work)
        if smallest_key(work.nearest[0, :n]) < 0 and not work.is_encoded[0]:
            return NOT_KEYS
    while pays:
        before, checked = recorded, average and work.deepest[0] > 0
        m, n_joined, recorded = plan_round(n, limit, recorded, work)
        lay_out_rows(m, 0, work.row[side])
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


@kernel
def record_merges(distances, target, limit, single, average, compared, work):
    """Record merges of one (N, N) float32 matrix: the first `target`, or those within the limit, and maybe others.

    With average linkage they may be fewer: work.in_doubt then says that `finish_exactly` must go on from there.
    """
    keys = distances.view(np.int32)
    work.is_encoded[0] = False
    while True:
        recorded = spanning_tree(keys, compared, work) if single else merge_image(keys, target, limit, average, work)
        if recorded != NOT_KEYS:
            return recorded
        if average:  # a mean of both signs may lose all its digits to rounding
            start(keys.shape[0], work)
            work.in_doubt[0] = True
            return 0
        encode(distances, work.encoded)
        work.is_encoded[0] = True
        keys = work.encoded
