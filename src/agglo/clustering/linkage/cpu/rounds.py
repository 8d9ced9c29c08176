"""Rounds, for many tokens: all pairs of groups that are each other's nearest neighbour merge at once.

Average and complete linkage are reducible (a merge never brings the merged group closer to a third one than the nearer
of its parts was), so merges may be recorded out of order and sorted at the end by (distance, first token, second
token): that is the order in which one-at-a-time merging would have done them, ties included (see
`linkage/reference.py`). Recording stops when enough merges are certain: no pair that is left comes before them.

After every round the distances are written anew for the groups that are left, and their nearest neighbours are found
while a row is still in cache. Rows are independent of each other, so threads can share an image: a `part` is one
thread's stripes of rows. Only the upper triangle of a matrix is read and written.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from agglo.clustering.kernels import inner, kernel
from agglo.clustering.linkage.cpu import cuts, keys

_STRIPE = 16  # rows a part takes in turn
_APART = 32  # numbers between what two threads write, lest they fight over a cache line
_PAYS_FROM = 20  # a round is worth its passes while it merges at least one group in so many

Workspace = namedtuple(
    "Workspace",
    "even odd nearest neighbour first size kept joined joined_share lines merges parent codes depth deepest bound close"
    " left in_doubt",
)


def workspace(n: int, parts: int) -> Workspace:
    """Return what threads that share an image of N tokens need; nothing in it is read before it is written."""

    def ints(*shape: int) -> np.ndarray:
        return np.empty(shape, np.int32)

    return Workspace(
        even=ints(n * n),  # the matrix after a round
        odd=ints(n * n),  # the matrix after every other round
        nearest=ints(parts, n + _APART),  # key of each group's nearest neighbour, as far as this part saw
        neighbour=ints(parts, n + _APART),  # which group that is
        first=ints(n),  # first token of each group
        size=np.empty(n, np.float32),  # tokens of each group
        kept=np.empty((2, n), np.uint32),  # the one or two old groups that make up each new group
        joined=np.empty((3, n), np.uint32),  # new groups made of two, and the two
        joined_share=np.empty((2, n), np.float32),  # the shares of the two in its size
        lines=ints(parts, 3, n + _APART),  # temporary rows
        merges=ints(3, n),  # key, first token, second token of every merge recorded
        parent=np.empty(n, np.int64),  # a token of the same group, nearer to the group's first
        codes=np.empty(n, np.int64),
        # Average linkage only, see `keys`:
        depth=ints(n),  # roundings each group's keys have gone through, at most
        deepest=ints(1),  # the largest of them
        bound=ints(n),  # keys up to here are too close to a merge of this round
        close=np.zeros(parts, np.int64),  # how many of those a part saw
        left=ints(1),  # the smallest key among pairs that are not merged
        in_doubt=np.zeros(1, np.bool_),  # whether `chains` must go on from the merges recorded
    )


@inner
def note_nearest(line, a, nearest, neighbour):
    """Update all nearest neighbours by row a, whose keys to the groups after it are `line`."""
    near, who = nearest[a + 1 :], neighbour[a + 1 :]
    me = np.int32(a)
    for b in range(line.shape[0]):
        closer = line[b] < near[b]
        who[b] = me if closer else who[b]
        near[b] = line[b] if closer else near[b]
    smallest = keys.smallest_key(line)
    if smallest < nearest[a]:
        nearest[a] = smallest
        neighbour[a] = me + np.int32(1) + keys.first_index_of(line, smallest)


@kernel
def find_nearest(part, parts, matrix, work):
    """Find nearest neighbours over the rows of this part of a matrix (N, N) of keys."""
    n = matrix.shape[0]
    nearest, neighbour = work.nearest[part], work.neighbour[part]
    for a in range(n):
        nearest[a] = keys.FAR
        neighbour[a] = 0
    for a in range(n):
        if (a // _STRIPE) % parts == part:
            note_nearest(matrix[a, a + 1 :], a, nearest, neighbour)


@kernel
def join_parts(n, parts, work):
    """Combine the nearest neighbours that the parts found, of equally near ones the first; return the smallest key."""
    nearest, neighbour = work.nearest[0], work.neighbour[0]
    for part in range(1, parts):
        other, who = work.nearest[part], work.neighbour[part]
        for a in range(n):
            if other[a] < nearest[a] or (other[a] == nearest[a] and who[a] < neighbour[a]):
                nearest[a] = other[a]
                neighbour[a] = who[a]
    return keys.smallest_key(nearest[:n])


@inner
def count_certain(n, smallest, recorded, work):
    """Count the recorded merges before the closest pair that is left, whose key is `smallest`."""
    a = keys.first_index_of(work.nearest[0, :n], smallest)
    x, y = work.first[a], work.first[max(work.neighbour[0, a], 0)]
    key, one, two = work.merges[0], work.merges[1], work.merges[2]
    certain = 0
    for m in range(recorded):
        tie_first = one[m] < x or (one[m] == x and two[m] < y)
        if key[m] < smallest or (key[m] == smallest and tie_first):
            certain += 1
    return certain


@kernel
def plan_round(n, limit, recorded, work):
    """Record every pair of mutual nearest neighbours within the limit, and say what the groups after it consist of.

    Returns the number of groups, of groups made of two, and of merges recorded.
    """
    nearest, neighbour = work.nearest[0], work.neighbour[0]
    depth, deepest = work.depth, work.deepest[0]
    for i in range(n):
        j = neighbour[i]
        merges = neighbour[j] == i and nearest[i] <= limit
        work.bound[i] = keys.bound_of(nearest[i], depth[i], depth[j], deepest) if merges else keys.NEVER
    m = 0
    joined = 0
    for i in range(n):
        j = neighbour[i]
        if neighbour[j] == i and nearest[i] <= limit:
            if j < i:
                continue
            work.merges[0, recorded] = nearest[i]
            work.merges[1, recorded] = work.first[i]
            work.merges[2, recorded] = work.first[j]
            recorded += 1
            total = work.size[i] + work.size[j]
            work.joined[0, joined] = m
            work.joined[1, joined] = i
            work.joined[2, joined] = j
            work.joined_share[0, joined] = work.size[i] / total
            work.joined_share[1, joined] = work.size[j] / total
            joined += 1
            work.kept[0, m] = i
            work.kept[1, m] = j
            work.size[m] = total
            depth[m] = max(depth[i], depth[j]) + np.int32(1)
            deepest = max(deepest, depth[m])
        else:
            work.kept[0, m] = i
            work.kept[1, m] = i
            work.size[m] = work.size[i]
            depth[m] = depth[i]
        work.first[m] = work.first[i]
        m += 1
    work.deepest[0] = deepest
    return m, joined, recorded


@kernel
def write_round(part, parts, matrix, out, n_joined, average, checked, work):
    """Write this part's rows of the keys (M, M) after a round, and if `checked`, count old keys close to a merge."""
    n, m = matrix.shape[0], out.shape[0]
    close = 0
    nearest, neighbour = work.nearest[part], work.neighbour[part]
    for a in range(m):
        nearest[a] = keys.FAR
        neighbour[a] = 0
    of_two, of_two_i, of_two_j = work.joined[0], work.joined[1], work.joined[2]
    share_i, share_j = work.joined_share[0], work.joined_share[1]
    merged_line, line_i, line_j = work.lines[part, 0], work.lines[part, 1], work.lines[part, 2]
    skip = 0  # groups made of two that stand at or before row a
    for a in range(m):
        while skip < n_joined and of_two[skip] <= a:
            skip += 1
        if (a // _STRIPE) % parts != part:
            continue
        i, j = work.kept[0, a], work.kept[1, a]
        if checked:
            close += keys.count_close(matrix[i, i + 1 :], work.bound[i + 1 : n], work.bound[i])
            if i != j:
                close += keys.count_close(matrix[j, j + 1 :], work.bound[j + 1 : n], work.bound[j])
        if i == j:
            line = matrix[i]
        else:
            line = merged_line[:n]
            for p in range(i + 1, j):
                line[p] = matrix[p, j]
            keys.copy_into(line[j:], matrix[j, j:])
            if average:
                keys.average_in_place(line[i + 1 :], matrix[i, i + 1 :], share_j[skip - 1], share_i[skip - 1])
            else:
                keys.maximum_in_place(line[i + 1 :], matrix[i, i + 1 :])

        target = out[a, a + 1 :]
        keys.gather_into(target, line, work.kept[0, a + 1 : m])
        if skip < n_joined:
            x, y = line_i[: n_joined - skip], line_j[: n_joined - skip]
            keys.gather_into(x, line, of_two_i[skip:n_joined])
            keys.gather_into(y, line, of_two_j[skip:n_joined])
            if average:
                keys.averages_in_place(x, y, share_i[skip:n_joined], share_j[skip:n_joined])
            else:
                keys.maximum_in_place(x, y)
            keys.scatter_into(out[a], x, of_two[skip:n_joined])
        note_nearest(target, a, nearest, neighbour)
    work.close[part] = close


@kernel
def after_round(m, parts, n_joined, checked, before, recorded, target, limit, work):
    """Return the merges that count, and whether no round follows: enough are certain, or work.in_doubt is set."""
    close = 0
    for part in range(parts):
        close += work.close[part]
    if checked and close != n_joined:
        work.in_doubt[0] = True
        return before, True
    smallest = join_parts(m, parts, work)
    if m == 1 or smallest > limit or count_certain(m, smallest, recorded, work) >= target:
        work.left[0] = smallest
        return recorded, True
    work.in_doubt[0] = n_joined * _PAYS_FROM < m or smallest == keys.FAR
    return recorded, work.in_doubt[0]


@kernel
def label_after_rounds(recorded, target, limit, average, labels, work):
    """Write labels (N,) after the first `target` recorded merges within the limit. Returns whether they are certain."""
    last = cuts.unite_first(work.merges[0], work.lines[0, 0], recorded, target, limit, work)
    cuts.number_groups(work.parent, labels)
    if work.in_doubt[0] or not (average and work.deepest[0] > 0 and target > 0):
        return not work.in_doubt[0]
    return not cuts.is_close(work.merges[0], last, recorded, limit, work.deepest[0], work.left[0])
