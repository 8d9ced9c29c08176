"""The backend for CUDA: one kernel launch from distances to labels, one program (CTA) per batch item.

A few large items would leave most multiprocessors idle. There the first search for neighbours and the ranking, whose
work is that of the whole matrix, are launches of their own, a program for each block of rows.

The host never waits for the device and every shape is known beforehand, so a call can be captured in a CUDA graph
(after one ordinary call, which compiles). Rounding and ties are those of `linkage/reference.py`. See docs/gpu.md.

Every linkage ends as N-1 edges, one for every token but token 0, so what follows is the same for all:

    parent[v], height[v]   joining v's group to that of parent[v] < v (groups: both their first members, v the later)
                           or, for single linkage, the edge between the tokens v and parent[v]
    edge key               (height, lower end, higher end): the order in which one-at-a-time merging takes the edges

Phases talk through global memory. One program stays on one multiprocessor, whose L1 is coherent for its own threads,
so a barrier between phases is all it takes. N is a run-time argument; only block sizes make a new binary.
`tools/gpu/races.py` checks that no barrier is missing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agglo.clustering.gpu import Declined

NOBODY = tl.constexpr(2**30)  # above every token and every pair code
TAKEN = tl.constexpr(2**63 - 1)  # above every packed edge
INT_ROWS = tl.constexpr(9)  # rows of N in the int32 workspace of an item
FLOAT_ROWS = tl.constexpr(2)  # rows of N in the workspace of the working precision
MAX_TOKENS = 2**13  # beyond it, candidates in `_prim` do not fit into registers
SPREAD_FROM = 2**9  # tokens; for fewer, two more launches cost what they save


@triton.jit
def _not_nan(x):
    """NaN turned to infinity: unchecked input may be anything, but must not stop the loops from ending."""
    return tl.where(x <= float("inf"), x, float("inf"))


@triton.jit
def _pair_code(a, b, n):
    """One number for the tokens a and b that sorts as (lower, higher)."""
    return tl.minimum(a, b) * n + tl.maximum(a, b)


@triton.jit
def _prim(distances, parent, height, n, TOKENS: tl.constexpr):
    """Single linkage: the minimum spanning tree from token 0, every distance read once.

    Candidates stay in registers, one int64 per token. Sorting a packed candidate sorts (distance, lower, higher); the
    last bit says which end is outside the tree and never decides, as an edge is a candidate from one side only.
    """
    v = tl.arange(0, TOKENS)
    outside = (v > 0) & (v < n)
    tl.store(parent, -1)
    key = tl.full((TOKENS,), TAKEN, tl.int64)
    newest = v * 0
    for _ in range(1, n):
        lower, higher = tl.minimum(v, newest), tl.maximum(v, newest)
        distance = tl.load(distances + lower * n + higher, mask=outside, other=0.0)
        distance = _not_nan(distance)
        bits = tl.where(distance == 0.0, 0.0, distance).to(tl.int32, bitcast=True)  # one zero, not two
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        edge = (bits << 31) | (lower << 16).to(tl.int64) | (higher << 1).to(tl.int64) | (v == higher).to(tl.int64)
        key = tl.where(outside, tl.minimum(key, edge), TAKEN)
        best = tl.min(key)
        lower, higher = ((best >> 16) & 0x7FFF).to(tl.int32), ((best >> 1) & 0x7FFF).to(tl.int32)
        is_higher = (best & 1) == 1
        added = tl.where(is_higher, higher, lower)
        bits = (best >> 31).to(tl.int32)
        tl.store(parent + added, tl.where(is_higher, lower, higher))
        tl.store(height + added, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True))
        outside = outside & (v != added)
        newest = v * 0 + added


@triton.jit
def _find_nearest(
    distances, work, size, rows, first_row, n_rows, live, n_live, nearest, nearest_distance, n,
    MIRROR: tl.constexpr, LINKAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find the nearest live group of every group in `rows`; of equally near ones the first.

    With MIRROR every token is a group, and the working matrix is not there yet: it is filled from the upper triangle of
    the input on the way.
    """
    for row_start in range(first_row, n_rows, ROWS):
        row_at = row_start + tl.arange(0, ROWS)
        r = row_at
        if not MIRROR:
            r = tl.load(rows + row_at, mask=row_at < n_rows, other=0)
        if LINKAGE == "average" and not MIRROR:
            row_size = tl.load(size + r, mask=row_at < n_rows, other=1)
        best = tl.full((ROWS, COLUMNS), float("inf"), work.dtype.element_ty)
        best_at = tl.full((ROWS, COLUMNS), NOBODY, tl.int32)
        for column_start in range(0, n_live, COLUMNS):
            column_at = column_start + tl.arange(0, COLUMNS)
            c = column_at
            if not MIRROR:
                c = tl.load(live + column_at, mask=column_at < n_live, other=0)
            other = (row_at < n_rows)[:, None] & (column_at < n_live)[None, :] & (r[:, None] != c[None, :])
            if MIRROR:
                distance = tl.load(distances + _pair_code(r[:, None], c[None, :], n), mask=other, other=0.0)
                distance = distance.to(work.dtype.element_ty)
                tl.store(work + r[:, None] * n + c[None, :], distance, mask=other)
            else:
                distance = tl.load(work + r[:, None] * n + c[None, :], mask=other, other=0.0)
                if LINKAGE == "average":
                    column_size = tl.load(size + c, mask=column_at < n_live, other=1)
                    distance = distance / (row_size[:, None] * column_size[None, :]).to(tl.float64)
            distance = _not_nan(distance)
            nearer = other & ((distance < best) | (best_at == NOBODY))
            best = tl.where(nearer, distance, best)
            best_at = tl.where(nearer, c[None, :], best_at)
        closest = tl.min(best, axis=1)
        closest_at = tl.min(tl.where(best == closest[:, None], best_at, NOBODY), axis=1)
        tl.store(nearest + r, closest_at, mask=row_at < n_rows)
        tl.store(nearest_distance + r, closest, mask=row_at < n_rows)


@triton.jit
def _match(
    nearest, nearest_distance, partner, size, pairs, survivors, stale, parent, height, n, LANES: tl.constexpr,
):  # fmt: skip
    """Join all groups that are each other's nearest; a group lives on at its first member.

    Lists, and counts, the pairs by their first group, the groups that survive, and those whose nearest group has to be
    found anew: all next to a pair, or all groups should rounding in a sum have left a round without pairs.
    """
    n_pairs = 0
    for start in range(0, n, LANES):
        v = start + tl.arange(0, LANES)
        alive = tl.load(parent + v, mask=v < n, other=0) < 0
        mate = tl.load(nearest + v, mask=alive, other=0)
        merged = alive & (tl.load(nearest + mate, mask=alive, other=NOBODY) == v)
        first, second = merged & (v < mate), merged & (v > mate)
        tl.store(partner + v, tl.where(merged, mate, NOBODY), mask=alive)
        tl.store(parent + v, mate, mask=second)
        tl.store(height + v, tl.load(nearest_distance + v, mask=second, other=0.0), mask=second)
        tl.store(pairs + n_pairs + tl.cumsum(first.to(tl.int32)) - 1, v, mask=first)
        n_pairs += tl.sum(first.to(tl.int32))
    tl.debug_barrier()
    n_survivors = 0
    n_stale = 0
    for start in range(0, n, LANES):
        v = start + tl.arange(0, LANES)
        survives = tl.load(parent + v, mask=v < n, other=0) < 0
        mate = tl.load(nearest + v, mask=survives, other=0)
        merged = survives & (tl.load(partner + v, mask=survives, other=NOBODY) != NOBODY)
        mate_merged = survives & (tl.load(partner + mate, mask=survives, other=NOBODY) != NOBODY)
        both = tl.load(size + v, mask=merged, other=0) + tl.load(size + mate, mask=merged, other=0)
        tl.store(size + v, both, mask=merged)
        lost_nearest = mate_merged | (survives & (v * 0 + n_pairs == 0))
        tl.store(survivors + n_survivors + tl.cumsum(survives.to(tl.int32)) - 1, v, mask=survives)
        tl.store(stale + n_stale + tl.cumsum(lost_nearest.to(tl.int32)) - 1, v, mask=lost_nearest)
        n_survivors += tl.sum(survives.to(tl.int32))
        n_stale += tl.sum(lost_nearest.to(tl.int32))
    return n_pairs, n_survivors, n_stale


@triton.jit
def _join(x, y, LINKAGE: tl.constexpr):
    """Combine two entries of the working matrix for a merged group: the largest distance, or the sum of all.

    Float64 sums are exact unless values differ by more than 2**29 / N**2, so quotients are those of the definition.
    """
    if LINKAGE == "average":
        return x + y
    else:
        return tl.maximum(x, y)


@triton.jit
def _merge_pairs(
    work, partner, pairs, n_pairs, live, n_live, survivors, n_survivors, n,
    LINKAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine the rows of the pairs, then the columns.

    Between two pairs the value is computed once and mirrored: a sum of four taken in another order could differ in its
    last bit, and then two groups might disagree on being each other's nearest.
    """
    for row_start in range(0, n_pairs, ROWS):
        row_at = row_start + tl.arange(0, ROWS)
        r = tl.load(pairs + row_at, mask=row_at < n_pairs, other=0)
        mate = tl.load(partner + r, mask=row_at < n_pairs, other=0)
        for column_start in range(0, n_live, COLUMNS):
            column_at = column_start + tl.arange(0, COLUMNS)
            c = tl.load(live + column_at, mask=column_at < n_live, other=0)[None, :]
            real = (row_at < n_pairs)[:, None] & (column_at < n_live)[None, :]
            real = real & (c != r[:, None]) & (c != mate[:, None])
            here = work + r[:, None] * n + c
            there = tl.load(work + mate[:, None] * n + c, mask=real, other=0.0)
            tl.store(here, _join(tl.load(here, mask=real, other=0.0), there, LINKAGE), mask=real)
    tl.debug_barrier()
    for row_start in range(0, n_survivors, ROWS):
        row_at = row_start + tl.arange(0, ROWS)
        r = tl.load(survivors + row_at, mask=row_at < n_survivors, other=0)
        row_merged = tl.load(partner + r, mask=row_at < n_survivors, other=NOBODY) != NOBODY
        for column_start in range(0, n_pairs, COLUMNS):
            column_at = column_start + tl.arange(0, COLUMNS)
            c = tl.load(pairs + column_at, mask=column_at < n_pairs, other=0)
            mate = tl.load(partner + c, mask=column_at < n_pairs, other=0)[None, :]
            c = c[None, :]
            real = (row_at < n_survivors)[:, None] & (column_at < n_pairs)[None, :]
            real = real & ((r[:, None] < c) | ((r[:, None] > c) & ~row_merged[:, None]))
            here = work + r[:, None] * n + c
            there = tl.load(work + r[:, None] * n + mate, mask=real, other=0.0)
            value = _join(tl.load(here, mask=real, other=0.0), there, LINKAGE)
            tl.store(here, value, mask=real)
            tl.store(work + c * n + r[:, None], value, mask=real & row_merged[:, None])
    tl.debug_barrier()


@triton.jit
def _load_edges(parent, height, v, n):
    """Height and pair code of the edges of tokens v; a token without one (yet) comes after all others."""
    up = tl.load(parent + v, mask=v < n, other=-1)
    joined = up >= 0
    return (
        tl.load(height + v, mask=joined, other=float("inf")),
        tl.where(joined, _pair_code(v, up, n), NOBODY),
    )


@triton.jit
def _all_found(
    nearest, nearest_distance, parent, height, k, threshold, n,
    PRECISION: tl.constexpr, CUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Whether no merge still to come can be among the ones asked for: all those have keys above the smallest left."""
    left = tl.full((LANES,), float("inf"), PRECISION)
    left_code = tl.full((LANES,), NOBODY, tl.int32)
    for start in range(0, n, LANES):
        v = start + tl.arange(0, LANES)
        alive = tl.load(parent + v, mask=v < n, other=0) < 0
        distance = tl.load(nearest_distance + v, mask=alive, other=float("inf"))
        code = tl.where(alive, _pair_code(v, tl.load(nearest + v, mask=alive, other=0), n), NOBODY)
        before = (distance < left) | ((distance == left) & (code < left_code))
        left = tl.where(before, distance, left)
        left_code = tl.where(before, code, left_code)
    smallest = tl.min(left)
    if CUT == "threshold":
        return smallest.to(tl.float32) > threshold
    else:
        smallest_code = tl.min(tl.where(left == smallest, left_code, NOBODY))
        n_before = 0
        for start in range(0, n, LANES):
            edge_height, edge_code = _load_edges(parent, height, start + tl.arange(0, LANES), n)
            before = (edge_height < smallest) | ((edge_height == smallest) & (edge_code < smallest_code))
            n_before += tl.sum(before.to(tl.int32))
        return n_before >= n - k


@triton.jit
def _rounds(
    distances, work, ints, nearest_distance, parent, height, k, threshold, n,
    LINKAGE: tl.constexpr, CUT: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Average and complete linkage: rounds in which all mutually nearest pairs merge."""
    nearest, partner, size, pairs, stale = ints, ints + n, ints + 2 * n, ints + 3 * n, ints + 4 * n
    live, survivors = ints + 5 * n, ints + 6 * n
    for start in range(0, n, LANES):
        v = start + tl.arange(0, LANES)
        tl.store(size + v, v * 0 + 1, mask=v < n)
        tl.store(live + v, v, mask=v < n)
        tl.store(parent + v, v * 0 - 1, mask=v < n)
    if not SPREAD:
        _find_nearest(
            distances, work, size, live, 0, n, live, n, nearest, nearest_distance, n, True, LINKAGE, ROWS, COLUMNS
        )
    n_live = n
    while n_live > 1:
        tl.debug_barrier()
        n_pairs, n_survivors, n_stale = _match(
            nearest, nearest_distance, partner, size, pairs, survivors, stale, parent, height, n, LANES
        )
        _merge_pairs(work, partner, pairs, n_pairs, live, n_live, survivors, n_survivors, n, LINKAGE, ROWS, COLUMNS)
        live, survivors = survivors, live
        n_live = n_survivors
        if n_live > 1:
            _find_nearest(
                distances, work, size, stale, 0, n_stale, live, n_live, nearest, nearest_distance, n,
                False, LINKAGE, ROWS, COLUMNS,
            )  # fmt: skip
            tl.debug_barrier()
            if _all_found(
                nearest, nearest_distance, parent, height, k, threshold, n, work.dtype.element_ty, CUT, LANES
            ):
                n_live = 1


@triton.jit
def _rank_edges(parent, height, rank, first_row, end_row, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """How many edges come before each; counting all pairs costs one pass of the size of the matrix, and no sort."""
    for row_start in range(first_row, end_row, ROWS):
        r = row_start + tl.arange(0, ROWS)
        own_height, own_code = _load_edges(parent, height, r, n)
        before = tl.zeros((ROWS, COLUMNS), tl.int32)
        for column_start in range(0, n, COLUMNS):
            other_height, other_code = _load_edges(parent, height, column_start + tl.arange(0, COLUMNS), n)
            lower = other_height[None, :] < own_height[:, None]
            tied = other_height[None, :] == own_height[:, None]
            before += (lower | (tied & (other_code[None, :] < own_code[:, None]))).to(tl.int32)
        tl.store(rank + r, tl.sum(before, axis=1), mask=r < n)


@triton.jit
def _write_labels(
    parent, height, rank, ints, labels, k, threshold, n, CUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Labels of the components the chosen edges leave, numbered by first member."""
    root, further, first_member, number = ints, ints + n, ints + 2 * n, ints + 3 * n
    for start in range(0, n, LANES):
        v = start + tl.arange(0, LANES)
        up = tl.load(parent + v, mask=v < n, other=-1)
        if CUT == "threshold":
            chosen = tl.load(height + v, mask=up >= 0, other=float("inf")).to(tl.float32) <= threshold
        else:
            chosen = tl.load(rank + v, mask=v < n, other=NOBODY) < n - k
        tl.store(root + v, tl.where(chosen & (up >= 0), up, v), mask=v < n)
        tl.store(first_member + v, v * 0 + NOBODY, mask=v < n)
    reach = 1
    while reach < n:  # every sweep doubles how far up a token sees
        tl.debug_barrier()
        for start in range(0, n, LANES):
            v = start + tl.arange(0, LANES)
            above = tl.load(root + tl.load(root + v, mask=v < n, other=0), mask=v < n, other=0)
            tl.store(further + v, above, mask=v < n)
        root, further = further, root
        reach *= 2
    tl.debug_barrier()
    for start in range(0, n, LANES):
        v = start + tl.arange(0, LANES)
        # With the default semantics it would be a fence for the whole device, and empty the L1.
        group = first_member + tl.load(root + v, mask=v < n, other=0)
        tl.atomic_min(group, v, mask=v < n, sem="relaxed", scope="cta")
    tl.debug_barrier()
    n_groups = 0
    for start in range(0, n, LANES):
        v = start + tl.arange(0, LANES)
        first = tl.load(first_member + tl.load(root + v, mask=v < n, other=0), mask=v < n, other=NOBODY)
        tl.store(number + v, n_groups + tl.cumsum((first == v).to(tl.int32)) - 1, mask=v < n)
        n_groups += tl.sum((first == v).to(tl.int32))
        tl.debug_barrier()  # the first of a group stands in this block of lanes or before it
        tl.store(labels + v, tl.load(number + first, mask=v < n, other=0).to(tl.int64), mask=v < n)


@triton.jit
def _of_item(ints, floats, item, n):
    """The workspace of an item: its int32 rows, distances to the nearest, heights, parents and ranks."""
    ints += item * n * INT_ROWS
    nearest_distance = floats + item * n * FLOAT_ROWS
    return ints, nearest_distance, nearest_distance + n, ints + 7 * n, ints + 8 * n


@triton.jit(do_not_specialize=["n"])
def cluster_kernel(
    distances, work, ints, floats, groups, labels, threshold, n,
    LINKAGE: tl.constexpr, CUT: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Cluster batch item `program_id(0)`.

    distances (B, N, N) float32: read only. work (B, N, N): float64 for average, float32 for complete, unused for
    single. ints (B, INT_ROWS, N) int32 and floats (B, FLOAT_ROWS, N) of the type of work (float32 for single): scratch.
    groups (B,) int64 and threshold: used where CUT is "k" and where it is "threshold". labels (B, N) int64: the result.
    Matrices are gone over in tiles of ROWS x COLUMNS, vectors LANES at a time; what stays in registers takes TOKENS, at
    least N. All are powers of two. With SPREAD, `search_kernel` ran before, and for CUT "k" the two below come after.
    """
    item = tl.program_id(0).to(tl.int64)  # B * N * N may pass 2**31
    distances += item * n * n
    ints, nearest_distance, height, parent, rank = _of_item(ints, floats, item, n)
    k = 0
    if CUT == "k":
        k = tl.load(groups + item).to(tl.int32)
    if LINKAGE == "single":
        _prim(distances, parent, height, n, TOKENS)
    else:
        _rounds(
            distances, work + item * n * n, ints, nearest_distance, parent, height, k, threshold, n,
            LINKAGE, CUT, SPREAD, ROWS, COLUMNS, LANES,
        )  # fmt: skip
    if CUT == "threshold" or not SPREAD:
        tl.debug_barrier()
        if CUT == "k":
            _rank_edges(parent, height, rank, 0, n, n, ROWS, COLUMNS)
            tl.debug_barrier()
        _write_labels(parent, height, rank, ints, labels + item * n, k, threshold, n, CUT, LANES)


@triton.jit(do_not_specialize=["n"])
def search_kernel(
    distances, work, ints, floats, n, LINKAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Fill the working matrix of batch item `program_id(0)`, and find the nearest, for one block of rows."""
    item, first_row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    ints, nearest_distance, _, _, _ = _of_item(ints, floats, item, n)
    _find_nearest(
        distances + item * n * n, work + item * n * n, ints, ints, first_row, tl.minimum(first_row + ROWS, n), ints, n,
        ints, nearest_distance, n, True, LINKAGE, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def rank_kernel(ints, floats, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rank the edges of batch item `program_id(0)`, for one block of rows."""
    _, _, height, parent, rank = _of_item(ints, floats, tl.program_id(0).to(tl.int64), n)
    first_row = tl.program_id(1) * ROWS
    _rank_edges(parent, height, rank, first_row, first_row + ROWS, n, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["n"])
def label_kernel(ints, floats, groups, labels, n, LANES: tl.constexpr):
    """Write the labels of batch item `program_id(0)` from ranked edges."""
    item = tl.program_id(0).to(tl.int64)
    ints, _, height, parent, rank = _of_item(ints, floats, item, n)
    k = tl.load(groups + item).to(tl.int32)
    _write_labels(parent, height, rank, ints, labels + item * n, k, 0.0, n, "k", LANES)


# No pipelining, as phases read what earlier ones wrote and loads must stay where they are. With at most 128 registers
# per thread nothing spills, and four programs of four warps share a multiprocessor; ROCm knows no such limit.
COMPILE_OPTIONS = {"num_stages": 1, "enable_fp_fusion": False} | ({} if torch.version.hip else {"maxnreg": 128})


_WARP = 64 if torch.version.hip else 32  # threads
_COLUMNS = 16


class Launch(NamedTuple):
    """Block sizes of the kernel, powers of two: tiles of rows x columns, vectors of lanes, all N tokens at once."""

    ROWS: int
    COLUMNS: int
    LANES: int
    TOKENS: int
    num_warps: int


def launch_for(linkage: str, n_tokens: int, few_items: bool = False) -> Launch:
    """Block sizes for N tokens: four values of a tile per thread, and more threads for more tokens.

    Never fewer lanes than threads: two threads holding the same value could read it before and after it changes. Few
    items, which do not fill the device, take all the threads there are; a step of single linkage waits for all of its
    threads, and more would not make it shorter. TOKENS is for single linkage alone.
    """
    tokens = max(256, 1 << (n_tokens - 1).bit_length())
    threads = 512 if few_items and linkage != "single" else min(tokens // 2, 512)
    tokens = tokens if linkage == "single" else 0
    return Launch(threads * 4 // _COLUMNS, _COLUMNS, max(threads, 256), tokens, threads // _WARP)


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def labels(distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) of distances (B, N, N), for k groups per item (B,) or all merges within a threshold."""
    batch, n, _ = distances.shape
    if n > MAX_TOKENS:
        raise Declined(f"the triton backend takes up to {MAX_TOKENS} tokens, got {n}; 'torch' takes more")
    if batch == 0 or n < 2:
        return distances.new_zeros((batch, n), dtype=torch.int64)
    precision = torch.float64 if linkage == "average" else torch.float32
    work = distances.new_empty((0,) if linkage == "single" else distances.shape, dtype=precision)
    ints = distances.new_empty((batch, INT_ROWS.value, n), dtype=torch.int32)
    floats = distances.new_empty((batch, FLOAT_ROWS.value, n), dtype=precision)
    result = distances.new_empty((batch, n), dtype=torch.int64)
    groups = ints if k is None else k.contiguous()
    # Rounded on the host, which does not wait for it.
    limit = 0.0 if threshold is None else torch.tensor(threshold, dtype=torch.float32, device="cpu").item()
    cut = "threshold" if k is None else "k"
    distances = distances.contiguous()
    few_items = batch < _multiprocessors(distances.device)
    spread = few_items and n >= SPREAD_FROM
    launch = launch_for(linkage, n, few_items)
    options = {"num_warps": launch.num_warps, **COMPILE_OPTIONS}
    rows, columns, lanes = launch.ROWS, launch.COLUMNS, launch.LANES
    blocks = (batch, triton.cdiv(n, rows))
    with torch.cuda.device_of(distances):
        if spread and linkage != "single":
            search_kernel[blocks](
                distances, work, ints, floats, n, LINKAGE=linkage, ROWS=rows, COLUMNS=columns, **options
            )
        cluster_kernel[(batch,)](
            distances, work, ints, floats, groups, result, limit, n,
            LINKAGE=linkage, CUT=cut, SPREAD=spread, **launch._asdict(), **COMPILE_OPTIONS,
        )  # fmt: skip
        if spread and k is not None:
            rank_kernel[blocks](ints, floats, n, ROWS=rows, COLUMNS=columns, **options)
            label_kernel[(batch,)](ints, floats, groups, result, n, LANES=lanes, **options)
    return result
