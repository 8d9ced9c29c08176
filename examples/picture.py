"""Cluster the patches of a photograph with every linkage, draw the groups, time it against scikit-learn.

python examples/picture.py       # writes example-output/groups.png
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering
from sklearn.datasets import load_sample_image

import agglo
from agglo.drawing.groups import draw_groups, first_members
from agglo.drawing.sheet import Panel, Row, compose

GRID = (26, 40)
PATCH = 16
KEEP_RATES = (0.5, 0.25, 0.05)
OUTPUT = Path("example-output")


def photograph() -> np.ndarray:
    """A photograph that comes with scikit-learn, (416, 640, 3) uint8."""
    return load_sample_image("china.jpg")[: GRID[0] * PATCH, : GRID[1] * PATCH]


def patch_features(picture: np.ndarray) -> torch.Tensor:
    """Colours of every patch at a quarter of the resolution, centred: (N, D)."""
    patches = torch.from_numpy(picture.copy()).float().view(GRID[0], PATCH, GRID[1], PATCH, 3)
    coarse = patches.view(GRID[0], 4, 4, GRID[1], 4, 4, 3).mean(dim=(2, 5))
    features = coarse.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1)
    return features - features.mean(dim=0) + 1e-3


def main() -> None:
    picture = photograph()
    features = patch_features(picture)
    n = len(features)
    rows = []
    for linkage in ("single", "average", "complete"):
        tree = agglo.linkage(features, linkage)
        panels = [Panel(picture, f"{n} patches")]
        for keep_rate in KEEP_RATES:
            labels = first_members(agglo.clustering.cut(tree, int(n * keep_rate))[None])[0].reshape(GRID)
            drawn = draw_groups(picture, labels, scale=1)
            panels.append(Panel(drawn, f"{int(n * keep_rate)} groups"))
        rows.append(Row(panels, f"{linkage} linkage"))
    OUTPUT.mkdir(exist_ok=True)
    file = OUTPUT / "groups.png"
    compose(rows).save(file)

    batch = features.expand(16, -1, -1) + torch.randn(16, *features.shape, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(batch, dim=-1)
    distances = 1 - unit @ unit.transpose(1, 2)
    threads = torch.get_num_threads()
    print(f"\n16 images of {n} tokens to {n // 2} groups each, from distances to labels, {threads} threads")
    print(f"{'linkage':<10}{'scikit-learn':>14}{'agglo':>10}{'ratio':>8}   same groups")
    for linkage in ("single", "average", "complete"):
        model = AgglomerativeClustering(n_clusters=n // 2, metric="precomputed", linkage=linkage)
        agglo.cluster(distances=distances, k=n // 2, linkage=linkage)  # the very first call compiles
        begin = time.perf_counter()
        ours = agglo.cluster(distances=distances, k=n // 2, linkage=linkage)
        middle = time.perf_counter()
        theirs = np.stack([model.fit(matrix).labels_ for matrix in distances.numpy()])
        end = time.perf_counter()
        same = bool(np.array_equal(ours.numpy(), canonical(theirs)))
        own, peer = middle - begin, end - middle
        print(f"{linkage:<10}{peer * 1e3:>11.0f} ms{own * 1e3:>7.1f} ms{peer / own:>7.1f}x   {same}")
    print(f"\nGroups of a photograph, drawn: {file}")
    print("Next, on a model of your own:  agglo.apply(model, keep_rate=0.5)   and   agglo visualize --help")


def canonical(labels: np.ndarray) -> np.ndarray:
    """The same partitions (B, N) with groups numbered by first member, as agglo numbers them."""
    first = first_members(torch.from_numpy(labels))
    return np.stack([np.unique(row, return_inverse=True)[1] for row in first])


if __name__ == "__main__":
    main()
