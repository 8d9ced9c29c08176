"""Tokens and Dynamic as HTML."""

from __future__ import annotations

from html import escape

import numpy as np

from agglo.drawing.dendrogram import dendrogram
from agglo.drawing.groups import Pixels, fill, grid_of
from agglo.playground.dynamic import Thresholded
from agglo.playground.page.html import (
    CLICK_HINT,
    code,
    figures,
    groups_figure,
    milliseconds,
    picture_figure,
    refused,
    section,
    table,
)
from agglo.playground.tokens import Answer, Compared, Passed, Reduced, Refused, Tree


def compared_html(found: Compared) -> str:
    """All of the Tokens tab."""
    parts = []
    for side in found.sides:
        parts.append(f"<h3>{escape(side.title)}</h3>")
        parts.append(_side(found, side, side.title))
    parts += [CLICK_HINT, _numbers(found)]
    if found.tree is not None:
        parts.append(_tree(found.pixels, found.tree))
    return section("tokens", *parts, code([side.line for side in found.sides]))


def _side(found: Compared, side: Reduced | Refused, name: str) -> str:
    """name: of the side, for the words about a group."""
    if isinstance(side, Refused):
        return refused(side.reason)
    input_picture = picture_figure(found.pixels, f"input: {found.tokens} tokens", "the picture as the model sees it")
    stages = [
        groups_figure(found.pixels, labels, f"after block {block}", name) for block, labels in side.stages.items()
    ]
    return figures([input_picture, *stages])


def _numbers(found: Compared) -> str:
    passes: list[Passed] = [found.dense, *(side for side in found.sides if isinstance(side, Reduced))]
    rows = [
        ["patch tokens", *(_counts(found, one) for one in passes)],
        ["GFLOPs", *(_gflops(found, one) for one in passes)],
        ["time of this pass", *(_time(found, one) for one in passes)],
    ]
    for rank in range(len(found.dense.top)):
        rows.append([f"answer {rank + 1}", *(_answer(found.dense, one, rank) for one in passes)])
    return table(["", *(escape(one.title) for one in passes)], rows, "Numbers of this pass") + _differences(passes)


def _counts(found: Compared, one: Passed) -> str:
    counts = one.counts if one is found.dense else [found.tokens, *one.counts]
    return f'<span class="counts" data-counts="{" ".join(map(str, counts))}">{" → ".join(map(str, counts))}</span>'


def _gflops(found: Compared, one: Passed) -> str:
    if one.gflops is None or not found.dense.gflops:
        return ""
    share = "" if one is found.dense else f" <small>({one.gflops / found.dense.gflops:.0%})</small>"
    return f'<span class="gflops" data-gflops="{one.gflops!r}">{one.gflops:.3f}</span>{share}'


def _time(found: Compared, one: Passed) -> str:
    share = "" if one is found.dense else f" <small>({found.dense.seconds / one.seconds:.2f}x)</small>"
    return f'<span class="time">{milliseconds(one.seconds)}</span>{share}'


def _answer(dense: Passed, one: Passed, rank: int) -> str:
    if rank >= len(one.top):
        return ""
    answer = one.top[rank]
    differs = one is not dense and answer.name != dense.top[rank].name
    mark = ' class="answer differs" title="not what the dense model says here"' if differs else ' class="answer"'
    return (
        f'<span{mark} data-name="{escape(answer.name)}" data-share="{answer.share!r}">{escape(answer.name)} '
        f'<small>{_percent(answer)}</small><i style="width:{100 * answer.share:.1f}%"></i></span>'
    )


def _percent(answer: Answer) -> str:
    return f"{answer.share:.1%}"


def _differences(passes: list[Passed]) -> str:
    """Where the answers differ, in words."""
    dense, *others = passes
    said = []
    for one in others:
        ranks = [
            str(rank + 1)
            for rank, (mine, its) in enumerate(zip(one.top, dense.top, strict=True))
            if mine.name != its.name
        ]
        where = f"differs from dense at answer {', '.join(ranks)}" if ranks else "gives the same answers as dense"
        said.append(f"{escape(one.title)} {where}")
    return f'<p class="hint differences">{"; ".join(said)}.</p>' if dense.top and said else ""


def _tree(pixels: Pixels, tree: Tree) -> str:
    merges = tree.merges.numpy()
    whose = (
        "these are the groups of the first reduction"
        if tree.is_method
        else "the method above groups in another way; this is what ATC would do with the same tokens"
    )
    title = f"{tree.linkage} linkage over {len(merges) + 1} tokens at block {tree.block}, cut into {tree.groups} groups"
    colours = _colours(pixels, len(merges) + 1)
    return (
        f"<h3>The tree of the picture's tokens</h3>{dendrogram(merges, tree.groups, colours, title)}"
        f'<p class="hint">{escape(title)}: {whose}. The foot of each line is the colour of its patch.</p>'
    )


def _colours(pixels: Pixels, n_patches: int) -> list[str]:
    """The mean colour of every patch."""
    grid = grid_of(n_patches, pixels.shape[:2])
    labels = np.arange(n_patches).reshape(grid)
    filled = fill(pixels, labels)
    height, width = pixels.shape[0] // grid[0], pixels.shape[1] // grid[1]
    return [
        f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in filled[::height, ::width].reshape(-1, 3).tolist()
    ]


def thresholded_html(found: Thresholded, names: list[str]) -> str:
    """All of the Dynamic tab."""
    parts, bars = [], []
    for name, one in zip(names, found.pictures, strict=True):
        [side] = one.sides
        left = "" if isinstance(side, Refused) else f": {one.tokens} → {side.counts[-1]} tokens"
        parts.append(f"<h3>{escape(name)}{left}</h3>")
        parts.append(_side(one, side, name))
        if isinstance(side, Reduced):
            bars.append(_bar(name, one, side))
    if bars:
        head = ["picture", "patch tokens", "left at the end", "GFLOPs", "time of this pass"]
        parts += [CLICK_HINT, table(head, bars, "Tokens that the pictures keep")]
    return section("dynamic", *parts, code([found.line]))


def _bar(name: str, one: Compared, side: Reduced) -> list[str]:
    left = side.counts[-1]
    return [
        escape(name),
        _counts(one, side),
        f'<span class="answer" data-left="{left}">{left} of {one.tokens}'
        f'<i style="width:{100 * left / one.tokens:.1f}%"></i></span>',
        _gflops(one, side),
        _time(one, side),
    ]
