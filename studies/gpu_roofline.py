"""How long the Triton kernel should take on an A100: rounds counted on data, bytes and steps derived from them.

Runs on any CPU: the rounds are played in NumPy with the kernel's rules (who merges, whose nearest is looked for again,
when it stops), and what the kernel would load and store in each is added up. Barriers and shuffles of reductions are
counted in the kernels as compiled for sm_80. An estimate; nothing runs on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from agglo.clustering.linkage.triton import SPREAD_FROM, Launch, launch_for
from agglo.utils.tables import Column, Table
from tools.gpu import binaries

IMAGES = 64  # to count rounds on, at 196 tokens
BYTES_PER_SECOND = 1.555e12  # A100 40 GB, memory
MULTIPROCESSORS = 108
REGISTERS_PER_THREAD = 128
FLOPS = 19.5e12  # float32, without tensor cores
CLOCK = 1.41e9
# Assumed:
CYCLES_PER_STEP = 1200  # two dependent loads that miss the caches (about 500 each), then arithmetic
CYCLES_PER_BARRIER, CYCLES_PER_SHUFFLE = 40, 25
EFFICIENCY = 0.5  # of the product's arithmetic


@dataclass
class Work:
    """What one program does for one item."""

    rounds: int = 0
    traffic: float = 0.0  # bytes loaded and stored, as if there were no cache
    steps: int = 0  # tiles and vectors one after the other, each waiting for memory
    barriers: int = 0
    shuffles: int = 0

    def tiles(self, rows: int, columns: int, launch: Launch) -> None:
        self.steps += math.ceil(rows / launch.ROWS) * math.ceil(columns / launch.COLUMNS)

    def reduce(self, kernel: str, linkage: str, launch: Launch, times: int) -> None:
        """Add the reductions of one block of rows, or of a step of single linkage, so many times."""
        barriers, shuffles = reductions(kernel, linkage, launch)
        self.barriers += barriers * times
        self.shuffles += shuffles * times

    @property
    def cycles(self) -> int:
        waits = CYCLES_PER_STEP * self.steps + CYCLES_PER_BARRIER * self.barriers
        return waits + CYCLES_PER_SHUFFLE * self.shuffles


@cache
def reductions(kernel: str, linkage: str, launch: Launch) -> tuple[int, int]:
    """Return the barriers and shuffles in a kernel that goes once through one block of rows."""
    phases = {phase.name: phase for phase in binaries.phases(linkage, "k", launch, spread=True)}
    binary = binaries.compiled(phases[kernel], "sm_80")
    return binary.barriers, binary.shuffles


def correlated_tokens(side: int, channels: int, generator: np.random.Generator) -> np.ndarray:
    """Tokens (side**2, channels) of one image: white noise blurred over the grid (sigma 1.5), plus 30 % white noise."""
    offset = np.arange(side)
    blur = np.exp(-((offset[:, None] - offset[None, :]) ** 2) / (2 * 1.5**2))
    smooth = np.einsum("ab,cd,bde->ace", blur, blur, generator.standard_normal((side, side, channels)))
    tokens: np.ndarray = smooth / smooth.std() + 0.3 * generator.standard_normal(smooth.shape)
    return tokens.reshape(side * side, channels)


def cosine_distances(tokens: np.ndarray) -> np.ndarray:
    unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    distances: np.ndarray = (1 - unit @ unit.T).astype(np.float32)
    return distances


def over_all_rows(work: Work, kernel: str, linkage: str, n: int, launch: Launch, spread: bool) -> None:
    """Go over the whole matrix: in one program, or a block of rows on each multiprocessor."""
    blocks = math.ceil(n / launch.ROWS)
    blocks = math.ceil(blocks / MULTIPROCESSORS) if spread else blocks
    work.tiles(blocks * launch.ROWS, n, launch)
    work.reduce(kernel, linkage, launch, blocks)


def finish(work: Work, linkage: str, n: int, width: int, launch: Launch, spread: bool) -> Work:
    """Ranks, components and labels."""
    over_all_rows(work, "rank", linkage, n, launch, spread)
    sweeps = math.ceil(math.log2(n))
    work.traffic += n * n / launch.ROWS * (4 + width) + n * (12 * sweeps + 60)
    work.steps += sweeps + 4
    return work


def prim(n: int, spread: bool) -> Work:
    """Single linkage: one step a token; half the distances are read down a column, a sector of 32 bytes each."""
    work, launch = Work(0, n * n / 2 * (4 + 32), n - 1), launch_for("single", n)
    work.reduce("cluster", "single", launch, n - 1)
    return finish(work, "single", n, 4, launch, spread)


def play_rounds(distances: np.ndarray, linkage: str, k: int, few: bool, spread: bool) -> Work:
    """Average or complete linkage of one item down to k groups, counting instead of timing."""
    n, width = len(distances), 8 if linkage == "average" else 4
    launch = launch_for(linkage, n, few)
    work = Work(traffic=n * (n - 1) * (4 + width))  # searched and mirrored in one go
    over_all_rows(work, "search", linkage, n, launch, spread)

    held = distances.astype(np.float64)  # sums for average, maxima for complete
    live, size = np.arange(n), np.ones(n)
    heights: list[float] = []
    while len(live) > 1:
        apart = held[np.ix_(live, live)]
        if linkage == "average":
            apart = apart / (size[live][:, None] * size[live][None, :])
        np.fill_diagonal(apart, np.inf)
        nearest = apart.argmin(1)
        if work.rounds and sum(height <= apart.min() for height in heights) >= n - k:
            break
        mutual = nearest[nearest] == np.arange(len(live))
        first = np.flatnonzero(mutual & (np.arange(len(live)) < nearest))
        survives = ~mutual | (np.arange(len(live)) < nearest)
        heights += list(apart[first, nearest[first]])

        n_pairs, n_survivors = len(first), int(survives.sum())
        n_stale = int((survives & mutual[nearest]).sum())
        unmerged_by_pair = (n_survivors - n_pairs) * n_pairs
        between_pairs = n_pairs * (n_pairs - 1) // 2
        work.rounds += 1
        work.traffic += width * (3 * n_pairs * (len(live) - 2) + 3 * unmerged_by_pair + 4 * between_pairs)
        work.traffic += width * n_stale * (n_survivors - 1) + n * (60 + 2 * width)
        work.tiles(n_pairs, len(live), launch)
        work.tiles(n_survivors, n_pairs, launch)
        work.tiles(n_stale, n_survivors, launch)
        work.reduce("search", linkage, launch, math.ceil(n_stale / launch.ROWS))
        work.steps += 4  # two passes to match, two to see whether to stop

        join = np.add if linkage == "average" else np.maximum
        for a, b in zip(live[first], live[nearest[first]], strict=True):
            held[a] = join(held[a], held[b])
            held[:, a] = join(held[:, a], held[:, b])
            size[a] += size[b]
        live = live[survives]
    return finish(work, linkage, n, width, launch, spread)


def clustering(batch: int, side: int, keeps: tuple[float, ...], n_images: int) -> Table:
    """Estimate the clustering of a batch of images with so many tokens along each side."""
    n, few = side**2, batch < MULTIPROCESSORS
    spread = few and n >= SPREAD_FROM
    generator = np.random.default_rng(0)
    images = [cosine_distances(correlated_tokens(side, 64, generator)) for _ in range(n_images)]
    columns = [Column("linkage", left=True), Column("keep"), Column("rounds (min, median, max)")]
    columns += [Column("MB per item", ".2f"), Column("memory ms", ".2f"), Column("steps"), Column("barriers")]
    columns += [Column("shuffles"), Column("latency ms", ".2f")]
    rows = []
    for linkage in ("average", "complete", "single"):
        threads = 32 * launch_for(linkage, n, few).num_warps
        waves = math.ceil(batch / (MULTIPROCESSORS * (65536 // (threads * REGISTERS_PER_THREAD))))
        for keep in keeps:
            k = round(n * keep)
            done = [
                prim(n, spread) if linkage == "single" else play_rounds(image, linkage, k, few, spread)
                for image in images
            ]
            rounds = [work.rounds for work in done]
            counted = "none" if linkage == "single" else f"{min(rounds)}, {np.median(rounds):.0f}, {max(rounds)}"
            traffic = float(np.mean([work.traffic for work in done]))
            slowest = max(done, key=lambda work: work.cycles)
            memory = traffic * batch / BYTES_PER_SECOND * 1e3
            latency = slowest.cycles / CLOCK * waves * 1e3
            counts = [slowest.steps, slowest.barriers, slowest.shuffles]
            rows.append([linkage, keep, counted, traffic / 1e6, memory, *counts, latency])
    return Table(columns, rows)


def glue(batch: int, n: int, heads: int, width: int, groups: int) -> Table:
    """Estimate what surrounds the clustering at one reduction of half precision tokens, with one token in front."""
    keys, tokens = batch * heads * n * width * 2, batch * (n + 1) * heads * width * 2
    matrix, rows = batch * n * n * 4, batch * n * width * 4
    product = batch * n * n * width / (FLOPS * EFFICIENCY)  # half of 2 B N^2 d: the upper triangle

    def parts() -> Iterator[tuple[str, float, float]]:
        yield "mean over heads", keys + rows, 0
        yield "normalise, multiply, 1 - p, clamp", rows + matrix, product
        yield "sort tokens by group", batch * n * (8 * n / 32 + 12), 0  # every 32 rows read all labels
        yield "means of groups", tokens * (1 + groups / n), 0

    table = [
        [name, moved / 1e6, moved / BYTES_PER_SECOND * 1e3, seconds * 1e3, max(moved / BYTES_PER_SECOND, seconds) * 1e3]
        for name, moved, seconds in parts()
    ]
    table.append(["all", *(sum(row[at] for row in table) for at in range(1, 5))])
    columns = [Column("kernel", left=True), Column("MB", ".1f"), Column("memory ms", ".3f")]
    return Table([*columns, Column("arithmetic ms", ".3f"), Column("the longer, ms", ".3f")], table)


def main() -> None:
    for batch, side, keeps, n_images in (
        (320, 14, (0.9, 0.5, 0.25), IMAGES),
        (64, 14, (0.5,), IMAGES),
        (1, 64, (0.5,), 1),
    ):
        print(f"B={batch}, N={side**2}, {n_images} image(s) played\n")
        launch = launch_for("average", side**2, batch < MULTIPROCESSORS)
        barriers, shuffles = reductions("search", "average", launch)
        print(f"A search among {launch.ROWS} rows (average): {barriers} barriers, {shuffles} shuffles\n")
        print(clustering(batch, side, keeps, n_images).markdown(), end="\n\n")
    print("B=320, 196 tokens of DeiT-S, float16, keep rate 0.5\n")
    print(glue(320, 196, 6, 64, 98).markdown())


if __name__ == "__main__":
    main()
