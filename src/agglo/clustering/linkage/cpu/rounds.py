"""Rounds: all pairs of groups that are each other's nearest neighbour merge at once.

After every round the distances are written anew for the groups that are left, and their nearest neighbours are found
while a row is still in cache: memory is only read and written in order, apart from one short column for every merged
row. Rows are independent of each other, so threads can share an image: a `part` is one thread's stripes of rows.

Only pairs a < b are stored, at flat[row[a] + b]; this reads the upper triangle of a square matrix (row[a] = a * N) and
a packed one alike.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.jit import inner, kernel
from agglo.clustering.keys import (
    FAR,
    average_in_place,
    averages_in_place,
    copy_into,
    first_index_of,
    gather_into,
    maximum_in_place,
    scatter_into,
    smallest_key,
)
from agglo.clustering.linkage.cpu.certainty import count_close, deepen, note_bounds

STRIPE = 16  # rows a part takes in turn


@inner
def note_nearest(line, a, nearest, neighbour):
    """Update all nearest neighbours by row a, whose keys to the groups after it are `line`."""
    n = line.shape[0]
    near = nearest[a + 1 :]
    who = neighbour[a + 1 :]
    me = np.int32(a)
    for b in range(n):
        closer = line[b] < near[b]
        who[b] = me if closer else who[b]
        near[b] = line[b] if closer else near[b]
    smallest = smallest_key(line)
    if smallest < nearest[a]:
        nearest[a] = smallest
        neighbour[a] = me + np.int32(1) + first_index_of(line, smallest)


@kernel
def find_nearest(part, parts, keys, work):
    """Find nearest neighbours over the rows of this part of a square (N, N) matrix of keys."""
    n = keys.shape[0]
    nearest, neighbour = work.nearest[part], work.neighbour[part]
    for a in range(n):
        nearest[a] = FAR
        neighbour[a] = 0
    for a in range(n):
        if (a // STRIPE) % parts == part:
            note_nearest(keys[a, a + 1 :], a, nearest, neighbour)


@kernel
def join_parts(n, parts, work):
    """Combine the nearest neighbours that the parts found into part 0; of equally near ones the first."""
    nearest, neighbour = work.nearest[0], work.neighbour[0]
    for part in range(1, parts):
        other, who = work.nearest[part], work.neighbour[part]
        for a in range(n):
            if other[a] < nearest[a] or (other[a] == nearest[a] and who[a] < neighbour[a]):
                nearest[a] = other[a]
                neighbour[a] = who[a]


@kernel
def certain_merges(n, recorded, work):
    """Count the recorded merges before the closest pair that is left; also return that pair's key (FAR: none)."""
    nearest = work.nearest[0]
    smallest = smallest_key(nearest[:n])
    if n == 1 or smallest == FAR:
        return recorded, FAR
    a = first_index_of(nearest[:n], smallest)
    x, y = work.first[a], work.first[max(work.neighbour[0, a], 0)]
    key, one, two = work.merges[0], work.merges[1], work.merges[2]
    certain = 0
    for m in range(recorded):
        tie_first = one[m] < x or (one[m] == x and two[m] < y)
        if key[m] < smallest or (key[m] == smallest and tie_first):
            certain += 1
    return certain, smallest


@kernel
def plan_round(n, limit, recorded, work):
    """Record every pair of mutual nearest neighbours within the limit, and say what the groups after it consist of.

    Returns the number of groups, of groups made of two, and of merges recorded.
    """
    nearest, neighbour = work.nearest[0], work.neighbour[0]
    note_bounds(n, limit, work)
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
            work.share[0, m] = work.size[i] / total
            work.share[1, m] = work.size[j] / total
            work.joined[0, joined] = m
            work.joined[1, joined] = i
            work.joined[2, joined] = j
            work.joined_share[0, joined] = work.share[0, m]
            work.joined_share[1, joined] = work.share[1, m]
            joined += 1
            work.kept[0, m] = i
            work.kept[1, m] = j
            work.size[m] = total
            deepen(m, i, j, work)
        else:
            work.kept[0, m] = i
            work.kept[1, m] = i
            work.size[m] = work.size[i]
            work.depth[m] = work.depth[i]
        work.first[m] = work.first[i]
        m += 1
    return m, joined, recorded


@kernel
def lay_out_rows(m, target):
    """Write the offsets of the rows of the packed upper triangle of m groups."""
    for a in range(m):
        target[a] = a * m - (a * (a + 1)) // 2 - a


@kernel
def write_round(part, parts, flat, row, n, m, n_joined, average, checked, out, out_row, work):
    """Write this part's rows of the distances between the m groups after a round, from those between the n before.

    `checked` asks to count, in work.close[part], the old keys that are within the bounds of a merge of this round.
    """
    close = 0
    nearest, neighbour = work.nearest[part], work.neighbour[part]
    for a in range(m):
        nearest[a] = FAR
        neighbour[a] = 0
    of_two, of_two_i, of_two_j = work.joined[0], work.joined[1], work.joined[2]
    share_i, share_j = work.joined_share[0], work.joined_share[1]
    merged_line, line_i, line_j = work.lines[part, 0], work.lines[part, 1], work.lines[part, 2]
    skip = 0  # groups made of two that stand at or before row a
    for a in range(m):
        while skip < n_joined and of_two[skip] <= a:
            skip += 1
        if (a // STRIPE) % parts != part:
            continue
        i, j = work.kept[0, a], work.kept[1, a]
        if checked:
            close += count_close(flat[row[i] + i + 1 : row[i] + n], work.bound[i + 1 : n], work.bound[i])
            if i != j:
                close += count_close(flat[row[j] + j + 1 : row[j] + n], work.bound[j + 1 : n], work.bound[j])
        if i == j:
            line = flat[row[i] : row[i] + n]
        else:
            line = merged_line[:n]
            for p in range(i + 1, j):
                line[p] = flat[row[p] + j]
            copy_into(line[j:], flat[row[j] + j : row[j] + n])
            if average:
                average_in_place(line[i + 1 :], flat[row[i] + i + 1 : row[i] + n], work.share[1, a], work.share[0, a])
            else:
                maximum_in_place(line[i + 1 :], flat[row[i] + i + 1 : row[i] + n])

        target = out[out_row[a] + a + 1 : out_row[a] + m]
        gather_into(target, line, work.kept[0, a + 1 : m])
        if skip < n_joined:
            x, y = line_i[: n_joined - skip], line_j[: n_joined - skip]
            gather_into(x, line, of_two_i[skip:n_joined])
            gather_into(y, line, of_two_j[skip:n_joined])
            if average:
                averages_in_place(x, y, share_i[skip:n_joined], share_j[skip:n_joined])
            else:
                maximum_in_place(x, y)
            scatter_into(out[out_row[a] : out_row[a] + m], x, of_two[skip:n_joined])
        note_nearest(target, a, nearest, neighbour)
    work.close[part] = close
