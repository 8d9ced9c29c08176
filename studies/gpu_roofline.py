"""How long the Triton kernel should take on an A100: rounds counted on data, bytes and steps derived from them.

Runs on any CPU: the rounds are played in NumPy with the kernel's rules (who merges, whose nearest is looked for again,
when it stops), and what the kernel would load and store in each is added up. An estimate; nothing runs on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from agglo.clustering.linkage.triton import Launch, launch_for
from agglo.utils.tables import Column, Table

SIDE = 14  # tokens along each side of an image
BATCH, IMAGES = 320, 64  # of a batch, and to count rounds on
BYTES_PER_SECOND = 1.555e12  # A100 40 GB, memory
MULTIPROCESSORS = 108
PROGRAMS_PER_MULTIPROCESSOR = 4  # of 4 warps with 128 registers per thread
CLOCK = 1.41e9
CYCLES_PER_STEP = 1200  # assumed: two dependent loads that miss the caches (about 500 each), then arithmetic


@dataclass
class Work:
    """What one program does for one item."""

    rounds: int = 0
    traffic: float = 0.0  # bytes loaded and stored, as if there were no cache
    steps: int = 0  # tiles, vectors and reductions one after the other, each waiting for memory

    def tiles(self, rows: int, columns: int, launch: Launch) -> None:
        self.steps += math.ceil(rows / launch.ROWS) * math.ceil(columns / launch.COLUMNS)


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


def finish(work: Work, n: int, width: int, launch: Launch) -> Work:
    """Ranks, components and labels."""
    work.tiles(n, n, launch)
    sweeps = math.ceil(math.log2(n))
    work.traffic += n * n / launch.ROWS * (4 + width) + n * (12 * sweeps + 60)
    work.steps += sweeps + 4
    return work


def prim(n: int) -> Work:
    """Single linkage: one step a token; half the distances are read down a column, a sector of 32 bytes each."""
    return finish(Work(0, n * n / 2 * (4 + 32), n - 1), n, 4, launch_for(n))


def play_rounds(distances: np.ndarray, linkage: str, k: int) -> Work:
    """Average or complete linkage of one item down to k groups, counting instead of timing."""
    n, launch, width = len(distances), launch_for(len(distances)), 8 if linkage == "average" else 4
    work = Work(traffic=n * (n - 1) * (4 + width))  # searched and mirrored in one go
    work.tiles(n, n, launch)

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
        work.steps += 4  # two passes to match, two to see whether to stop

        join = np.add if linkage == "average" else np.maximum
        for a, b in zip(live[first], live[nearest[first]], strict=True):
            held[a] = join(held[a], held[b])
            held[:, a] = join(held[:, a], held[:, b])
            size[a] += size[b]
        live = live[survives]
    return finish(work, n, width, launch)


def main() -> None:
    n = SIDE**2
    generator = np.random.default_rng(0)
    images = [cosine_distances(correlated_tokens(SIDE, 64, generator)) for _ in range(IMAGES)]
    fitting = MULTIPROCESSORS * max(PROGRAMS_PER_MULTIPROCESSOR * 4 // launch_for(n).num_warps, 1)
    waves = math.ceil(BATCH / fitting)
    print(f"B={BATCH}, N={n}, {IMAGES} images, {waves} wave(s) of up to {fitting} programs\n")
    columns = [Column("linkage", left=True), Column("keep"), Column("rounds (min, median, max)")]
    columns += [Column("MB per item", ".2f"), Column("GB per batch", ".2f"), Column("memory ms", ".2f")]
    columns += [Column("steps"), Column("latency ms", ".2f")]
    rows = []
    for linkage in ("average", "complete", "single"):
        for keep in (0.9, 0.5, 0.25):
            k = round(n * keep)
            done = [prim(n) if linkage == "single" else play_rounds(image, linkage, k) for image in images]
            rounds = [work.rounds for work in done]
            counted = "none" if linkage == "single" else f"{min(rounds)}, {np.median(rounds):.0f}, {max(rounds)}"
            traffic = float(np.mean([work.traffic for work in done]))
            slowest = max(work.steps for work in done)
            of_batch = traffic * BATCH
            memory, latency = of_batch / BYTES_PER_SECOND * 1e3, slowest * CYCLES_PER_STEP / CLOCK * waves * 1e3
            rows.append([linkage, keep, counted, traffic / 1e6, of_batch / 1e9, memory, slowest, latency])
    print(Table(columns, rows).markdown())


if __name__ == "__main__":
    main()
