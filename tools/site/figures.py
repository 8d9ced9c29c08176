"""The pictures of "How it works", drawn from the real thing: make figures

Rounds and trees are computed here the slow way and compared with agglo's own before anything is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from scipy.cluster.hierarchy import dendrogram, linkage

import agglo

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
COLOURS = ["#00796b", "#e64a19", "#5e35b1", "#f9a825", "#1e88e5", "#8d6e63", "#c2185b", "#558b2f"]
INK, PALE = "#37474f", "#b0bec5"
Groups = list[list[int]]


def tokens() -> np.ndarray:
    """Sixteen tokens with two coordinates, (16, 2)."""
    return np.random.default_rng(5).uniform(size=(16, 2))


def distances(points: np.ndarray) -> np.ndarray:
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


def between(table: np.ndarray, one: Sequence[int], other: Sequence[int], kind: str) -> float:
    """The distance of two groups: the mean or the smallest of those of their members."""
    found = table[np.ix_(one, other)]
    return float(found.mean() if kind == "average" else found.min())


def nearest(table: np.ndarray, groups: Groups, kind: str) -> list[int]:
    """For each group the number of the closest other one."""
    return [
        min((j for j in range(len(groups)) if j != i), key=lambda j, i=i: between(table, groups[i], groups[j], kind))
        for i in range(len(groups))
    ]


def rounds(table: np.ndarray) -> tuple[list[Groups], list[tuple[float, frozenset[int], int]]]:
    """Average linkage by rounds: the groups before each round, and every merge: height, members, round."""
    groups: Groups = [[i] for i in range(len(table))]
    before, merges = [], []
    while len(groups) > 1:
        before.append(groups)
        best = nearest(table, groups, "average")
        pairs = [(i, j) for i, j in enumerate(best) if best[j] == i and i < j]
        for i, j in pairs:
            height = between(table, groups[i], groups[j], "average")
            merges.append((height, frozenset(groups[i] + groups[j]), len(before)))
        gone = {i for pair in pairs for i in pair}
        groups = [g for i, g in enumerate(groups) if i not in gone] + [groups[i] + groups[j] for i, j in pairs]
    return before, sorted(merges)


def hull(axes: Any, lines: Iterable[np.ndarray], colour: str) -> None:
    """A soft blob around a group: thick pale lines (2, 2) between its members."""
    pale = 0.72 + 0.28 * np.array(to_rgb(colour))
    for line in lines:
        axes.plot(*line.T, color=pale, linewidth=20, solid_capstyle="round", zorder=0)


def pairs_of(points: np.ndarray) -> list[np.ndarray]:
    return [np.stack(pair) for pair in combinations(points, 2)]


def plain(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11.5, color=INK)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color(PALE)


def draw_rounds() -> None:
    points = tokens()
    table = distances(points)
    before, merges = rounds(table)
    tree = agglo.linkage(distances=torch.from_numpy(table).float(), linkage="average").numpy()
    assert np.allclose([height for height, *_ in merges], tree[:, 2], atol=1e-5), "rounds must give the same tree"
    shown = before[:3]
    figure, grid = plt.subplots(2, 2, figsize=(9, 8))
    axes = grid.ravel()
    for number, (groups, place) in enumerate(zip(shown, axes, strict=False)):
        best = nearest(table, groups, "average")
        centres = np.array([points[group].mean(axis=0) for group in groups])
        for group in groups:
            hull(place, pairs_of(points[group]), PALE)
        for i, j in enumerate(best):
            mutual = best[j] == i
            colour = COLOURS[number] if mutual else PALE
            arrow = FancyArrowPatch(
                centres[i], centres[j], arrowstyle="-|>", mutation_scale=11, color=colour, shrinkA=5, shrinkB=5,
                linewidth=2.4 if mutual else 1.1, zorder=2,
            )  # fmt: skip
            place.add_patch(arrow)
        place.plot(*points.T, "o", color=INK, markersize=5, zorder=3)
        pairs = sum(best[j] == i for i, j in enumerate(best)) // 2
        plain(place, f"round {number + 1}\n{len(groups)} groups, {pairs} mutual pairs merge")
        place.margins(0.12)
    of_round = {members: number for _, members, number in merges}
    members: dict[int, frozenset[int]] = {i: frozenset([i]) for i in range(len(points))}
    for row, (a, b, *_) in enumerate(tree):
        members[len(points) + row] = members[int(a)] | members[int(b)]
    dendrogram(
        tree, ax=axes[3], no_labels=True, above_threshold_color=INK,
        link_color_func=lambda node: COLOURS[of_round[members[node]] - 1],
    )  # fmt: skip
    axes[3].set_title("the tree\ncoloured by round", fontsize=10.5, color=INK)
    axes[3].set_ylabel("height of the merge", color=INK, fontsize=9)
    axes[3].spines[["top", "right"]].set_visible(False)
    for number in range(len(before)):
        axes[3].plot([], [], color=COLOURS[number], linewidth=3, label=f"round {number + 1}")
    axes[3].set_ylim(0, tree[-1, 2] * 1.35)
    axes[3].legend(frameon=False, fontsize=8.5, ncols=3, loc="upper center")
    save(figure, "how-rounds")


def draw_boruvka() -> None:
    points = np.random.default_rng(5).uniform(size=(24, 2))
    table = distances(points)
    groups: Groups = [[i] for i in range(len(points))]
    edges: list[tuple[int, int, int]] = []
    figure, grid = plt.subplots(2, 2, figsize=(9, 8))
    axes = grid.ravel()
    number = 0
    while len(groups) > 1:
        number += 1
        added = []
        for group in groups:
            others = [i for i in range(len(points)) if i not in group]
            added.append(min(((i, j) for i in group for j in others), key=lambda pair: table[pair]))
        fresh = {(min(pair), max(pair)) for pair in added}
        place = axes[number - 1]
        hull(place, [points[[i, j]] for i, j, _ in edges], PALE)
        draw_edges(place, points, [(i, j) for i, j, _ in edges], PALE, 1.4)
        draw_edges(place, points, fresh, COLOURS[number - 1], 2.6)
        place.plot(*points.T, "o", color=INK, markersize=5, zorder=3)
        plain(place, f"round {number}\neach of {len(groups)} groups joins its nearest")
        edges += [(*pair, number) for pair in fresh]
        groups = components(len(points), [(i, j) for i, j, _ in edges])
    heights = sorted(table[i, j] for i, j, _ in edges)
    assert np.allclose(heights, linkage(table[np.triu_indices(len(points), 1)], "single")[:, 2]), "a spanning tree"
    assert number == len(axes) - 1, f"{number} rounds do not fill the picture"
    place, n_groups = axes[3], 5
    kept = sorted(edges, key=lambda edge: table[edge[0], edge[1]])[: len(points) - n_groups]
    cut = components(len(points), [(i, j) for i, j, _ in kept])
    labels = agglo.cluster(distances=torch.from_numpy(table).float(), k=n_groups, linkage="single").tolist()
    assert {frozenset(group) for group in cut} == {
        frozenset(i for i, label in enumerate(labels) if label == one) for one in set(labels)
    }
    for colour, group in zip(COLOURS, cut, strict=False):
        hull(place, [points[[i, j]] for i, j, _ in kept if i in group], colour)
    draw_edges(place, points, [(i, j) for i, j, _ in kept], INK, 1.6)
    place.plot(*points.T, "o", color=INK, markersize=5, zorder=3)
    plain(place, f"the end\nwithout the {n_groups - 1} longest edges: {n_groups} groups")
    for place in axes:
        place.margins(0.12)
    save(figure, "how-boruvka")


def draw_edges(axes: Any, points: np.ndarray, edges: Iterable[tuple[int, int]], colour: str, width: float) -> None:
    for i, j in edges:
        axes.plot(*points[[i, j]].T, color=colour, linewidth=width, zorder=2)


def components(count: int, edges: Iterable[tuple[int, int]]) -> Groups:
    root = list(range(count))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for i, j in edges:
        root[max(find(i), find(j))] = min(find(i), find(j))
    return [[i for i in range(count) if find(i) == one] for one in sorted({find(i) for i in range(count)})]


def draw_cut() -> None:
    """Eight tokens, each of four there twice: by height there is no way to get six groups."""
    features = torch.tensor([[place, 0.0] for place in (0.0, 0.4, 1.0, 1.5) for _ in range(2)])
    tree = agglo.linkage(features, metric="euclidean").numpy()
    assert len(set(agglo.cluster(features, k=6, metric="euclidean").tolist())) == 6
    lifted = tree.copy()
    lifted[tree[:, 2] == 0, 2] = 0.09  # drawn a little above 0, to be seen at all
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    for place in axes:
        drawn = dendrogram(lifted, ax=place, no_labels=True, color_threshold=0, above_threshold_color=PALE)
        place.set_yticks([])
        place.spines[["top", "right", "left"]].set_visible(False)
        place.set_ylim(0, lifted[-1, 2] * 1.12)
        place.set_xlim(-2, 92)
    for height, words, colour in ((0.04, "8 groups", COLOURS[1]), (0.24, "4 groups", COLOURS[0])):
        axes[0].axhline(height, xmax=0.86, color=colour, linewidth=2)
        axes[0].text(81, height, words, color=colour, fontsize=10, va="center")
    axes[0].set_title("cut by height: all four pairs of twins, or none", fontsize=11, color=INK)
    axes[0].set_ylabel("height of the merge", color=INK)
    links = sorted(zip(drawn["icoord"], drawn["dcoord"], strict=True), key=lambda link: (link[1][1], link[0][0]))
    for order, (xs, ys) in enumerate(links, start=1):
        colour = COLOURS[0] if order <= 2 else "#78909c"
        axes[1].plot(xs, ys, color=colour, linewidth=2.8 if order <= 2 else 1.4, zorder=3)
        axes[1].annotate(
            str(order), (float(np.mean(xs)), ys[1]), ha="center", va="center", fontsize=9, color="white", zorder=4,
            bbox={"boxstyle": "circle,pad=0.22", "facecolor": colour, "edgecolor": "white"},
        )  # fmt: skip
    axes[1].set_title("cut by order: merges 1 and 2 are done, 6 groups", fontsize=11, color=INK)
    save(figure, "how-cut")


def draw_attention() -> None:
    """One query looks at six tokens, of which four are alike and become one."""
    logits = np.array([1.2, 1.2, 1.2, 1.2, 1.9, 0.3])
    names = ["sky"] * 4 + ["bird", "roof"]
    full = np.exp(logits) / np.exp(logits).sum()
    merged = np.array([1.2, 1.9, 0.3])
    plain_ = np.exp(merged) / np.exp(merged).sum()
    sized = merged + np.log([4, 1, 1])
    sized = np.exp(sized) / np.exp(sized).sum()
    assert np.allclose(sized, [full[:4].sum(), full[4], full[5]])
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True)
    palette = {"sky": COLOURS[4], "bird": COLOURS[1], "roof": COLOURS[5]}
    panels = [
        (names, full, "six tokens\n"),
        (["sky x 4", "bird", "roof"], plain_, "merged, sizes forgotten:\nthe sky fades"),
        (["sky x 4", "bird", "roof"], sized, "merged, log(4) added:\nas before"),
    ]
    for place, (labels, heights, title) in zip(axes, panels, strict=True):
        bars = place.bar(range(len(labels)), heights, color=[palette[label.split()[0]] for label in labels], width=0.7)
        place.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=9, color=INK)
        place.set_xticks(range(len(labels)), labels)
        place.set_title(title, fontsize=11, color=INK)
        place.set_ylim(0, 0.72)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("attention of one query", color=INK)
    save(figure, "how-attention")


def draw_unmerging() -> None:
    """A row of tokens, its groups, and the way back."""
    labels = [0, 0, 1, 0, 2, 2, 3, 1]
    figure, axes = plt.subplots(figsize=(9.5, 3.6))
    rows = [(2.6, labels, "tokens,\ncoloured by group"), (1.3, [0, 1, 2, 3], "one token per group,\nwith its size")]
    rows.append((0.0, labels, "unmerged: every position\nhas its group's token"))
    xs = {0: np.arange(8) + 1.0, 1: np.array([2.2, 3.9, 5.6, 7.3]), 2: np.arange(8) + 1.0}
    sizes = [labels.count(label) for label in range(4)]
    for number, (y, row, words) in enumerate(rows):
        for x, label in zip(xs[number], row, strict=True):
            box = FancyBboxPatch((x - 0.33, y - 0.26), 0.66, 0.52, boxstyle="round,pad=0,rounding_size=0.1")
            box.set(facecolor=COLOURS[label], edgecolor="white", alpha=0.95 if number else 0.75)
            axes.add_patch(box)
            if number == 1:
                axes.text(x, y, f"x {sizes[label]}", ha="center", va="center", color="white", fontsize=11)
        axes.text(0.45, y, words, ha="right", va="center", fontsize=10.5, color=INK)
    for i, label in enumerate(labels):
        for y, begin, end in ((2.3, xs[0][i], xs[1][label]), (0.98, xs[1][label], xs[2][i])):
            axes.plot([begin, end], [y, y - 0.68], color=COLOURS[label], alpha=0.6, linewidth=1.6)
    axes.text(8.6, 1.95, "merge: size-weighted\nmean", fontsize=10.5, color=INK, va="center")
    axes.text(8.6, 1.3, "blocks run on\n4 tokens", fontsize=10.5, color=INK, va="center")
    axes.text(8.6, 0.65, "unmerge: copies", fontsize=10.5, color=INK, va="center")
    axes.set_xlim(-1.9, 11.2)
    axes.set_ylim(-0.5, 3.1)
    axes.axis("off")
    save(figure, "how-unmerging")


def floors() -> list[tuple[list[str], str]]:
    """The rooms of ARCHITECTURE.md, floor by floor from the top, and what it says about them."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    found = re.search(r"## Rooms.*?```\n(.*?)```", text, re.DOTALL)
    assert found is not None, "ARCHITECTURE.md has no block of rooms"
    lines = [re.split(r"\s{4,}", line.strip(), maxsplit=1) for line in found[1].splitlines() if line.strip()]
    return [(re.split(r"\s{2,}", line[0]), line[1] if len(line) > 1 else "") for line in lines]


def draw_layers() -> None:
    rows = floors()
    figure, axes = plt.subplots(figsize=(12, 0.5 * len(rows) + 0.3))
    for number, (rooms, words) in enumerate(rows):
        y = len(rows) - number
        axes.add_patch(Rectangle((0, y - 0.42), 24, 0.84, color="#eceff1" if number % 2 else "#f7f9fa", zorder=0))
        width = 10.4 / len(rooms)
        for place, room in enumerate(rooms):
            coming = room.startswith("(")
            box = FancyBboxPatch(
                (0.25 + place * width, y - 0.3), width - 0.3, 0.6, boxstyle="round,pad=0,rounding_size=0.12"
            )
            box.set(
                facecolor="white" if coming else COLOURS[0], edgecolor=COLOURS[0], linestyle="--" if coming else "-"
            )
            axes.add_patch(box)
            colour = COLOURS[0] if coming else "white"
            axes.text(
                0.25 + place * width + (width - 0.3) / 2,
                y,
                room.strip("()"),
                ha="center",
                va="center",
                color=colour,
                fontsize=10.5,
            )
        axes.text(11, y, words, va="center", fontsize=9.3, color=INK)
    axes.set_xlim(0, 24)
    axes.set_ylim(0.4, len(rows) + 0.6)
    axes.axis("off")
    save(figure, "how-layers")


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.png", dpi=140, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    mpl.use("Agg")
    for draw in (draw_rounds, draw_boruvka, draw_cut, draw_attention, draw_unmerging, draw_layers):
        draw()


if __name__ == "__main__":
    main()
