"""Average linkage under cosine distance without a distance matrix: where does that win?

The mean distance between two groups is 1 - m_i . m_j, m the mean of their unit vectors. So rounds of mutual nearest
neighbours can multiply the means anew instead of updating distances: O(N D) memory, but a matrix product every round.
Both sides start from features (1, N, D) and end with labels; times are the median of `--repeats` runs taken in turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median

import torch
from torch import Tensor

from agglo.clustering import cluster
from agglo.clustering.tree import number_by_first_member
from agglo.lab.bench.clustering import spatial_tokens
from agglo.utils.machine import machine
from agglo.utils.tables import Column, Table
from agglo.utils.timing import seconds_in_turns, seconds_per_pass

ROWS = 1024  # similarities of so many groups are alive at once


def nearest(means: Tensor) -> tuple[Tensor, Tensor]:
    """Similarity and index of every group's most similar other group."""
    values, places = [], []
    for top in range(0, len(means), ROWS):
        similarity = means[top : top + ROWS] @ means.T
        similarity[torch.arange(len(similarity)), torch.arange(top, top + len(similarity))] = -torch.inf
        value, place = similarity.max(dim=1)
        values.append(value)
        places.append(place)
    return torch.cat(values), torch.cat(places)


def cluster_by_means(features: Tensor, k: int) -> Tensor:
    """Labels (N,) of features (N, D)."""
    n = len(features)
    sums = torch.nn.functional.normalize(features, dim=-1)
    size, first = torch.ones(n), torch.arange(n)
    heights: list[Tensor] = []
    merges: list[Tensor] = []
    while True:
        similarity, partner = nearest(sums / size[:, None])
        recorded = torch.cat(heights) if heights else torch.empty(0)
        if (recorded > similarity.max()).sum() >= n - k:
            break
        here = torch.arange(len(sums))
        mutual = partner[partner] == here
        leads, leaves = mutual & (here < partner), mutual & (here > partner)
        heights.append(similarity[leaves])
        merges.append(torch.stack([first[partner[leaves]], first[leaves]]))
        sums[leads] += sums[partner[leads]]
        size[leads] += size[partner[leads]]
        sums, size, first = sums[~leaves], size[~leaves], first[~leaves]
    order = torch.cat(heights).argsort(descending=True)[: n - k]
    one, two = torch.cat(merges, dim=1)[:, order]
    parent = torch.arange(n)
    parent[two] = one
    while not torch.equal(parent[parent], parent):
        parent = parent[parent]
    return number_by_first_member(parent[None])[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", type=int, default=[196, 1024, 4096, 9216])
    parser.add_argument("--repeats", type=int, default=5)


def run(arguments: argparse.Namespace) -> None:
    print(machine())
    columns = [Column("N"), Column("matrix, ms", ".1f"), Column("means, ms", ".1f"), Column("means / matrix", ".1f")]
    columns += [Column("same partition"), Column("matrix, MB", ".1f"), Column("means, MB", ".1f")]
    rows = []
    for n in arguments.sizes:
        features = spatial_tokens(1, n)
        runs = partial(cluster, features, n // 2), partial(cluster_by_means, features[0], n // 2)
        taken = seconds_in_turns([partial(seconds_per_pass, run) for run in runs], arguments.repeats)
        matrix, means = (median(times) * 1e3 for times in taken)
        same = torch.equal(runs[0]()[0], runs[1]())
        memory = n * n * 4 / 1e6, (n * 64 + min(n, ROWS) * n) * 4 / 1e6
        rows.append([n, matrix, means, means / matrix, same, *memory])
    print(Table(columns, rows).markdown())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    run(parser.parse_args())
