"""Synthesis as HTML."""

from __future__ import annotations

from html import escape

import numpy as np

from agglo.playground.page.html import code, figure, figures, groups_figure, refused, section, table
from agglo.playground.synthesis import Column, Drawn, Kept


def drawn_html(found: Drawn) -> str:
    """The pictures as far as they are, with a progress bar; numbers at the end."""
    share = found.done
    bar = (
        f'<div class="progress" role="progressbar" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{share * 100:.0f}" aria-label="Denoising"><i style="width:{share * 100:.1f}%"></i></div>'
    )
    is_whole = all(column.refused is not None or column.seconds is not None for column in found.columns)
    parts = [bar, figures([_column(column, found.steps) for column in found.columns])]
    if is_whole:
        parts.append(_numbers(found))
    parts.append(code([column.line for column in found.columns[1:]]))
    return section("synthesis", *parts)


def _column(column: Column, steps: int) -> str:
    if column.refused is not None:
        return f"<figure><figcaption>{escape(column.title)}</figcaption>{refused(column.refused)}</figure>"
    caption = f"{column.title}: step {column.done} of {steps}"
    if column.picture is None:
        return f'<figure><div class="frame empty"></div><figcaption>{escape(caption)}</figcaption></figure>'
    return figure(column.picture, caption, f"what {column.title} drew")


def _numbers(found: Drawn) -> str:
    dense = found.columns[0]
    rows = []
    for column in found.columns:
        if column.refused is not None or column.seconds is None:
            continue
        share = (
            "" if column is dense or not dense.seconds else f" <small>({dense.seconds / column.seconds:.2f}x)</small>"
        )
        difference = "" if column.difference is None else f"{column.difference:.2f}"
        rows.append(
            [
                escape(column.title),
                f'<span class="tokens" data-tokens="{" ".join(map(str, column.tokens))}">{_tokens(column)}</span>',
                f'<span class="time">{column.seconds:.2f} s</span>{share}',
                f'<span class="difference">{difference}</span>',
            ]
        )
    head = ["", "groups per self-attention", "time of this picture", "mean difference to dense, of 255"]
    return table(head, rows, "Numbers of these pictures")


def _tokens(column: Column) -> str:
    counts = sorted(set(column.tokens), reverse=True)
    return "all" if not counts else ", ".join(map(str, counts))


def step_html(ways: list[Kept], step: int, attention: int) -> str:
    """The groups of a step, counted from 1, at one self-attention, counted from 0, over the finished pictures."""
    parts = []
    for way in ways:
        groups = way.groups[min(max(step, 1), len(way.groups)) - 1]
        blocks = sorted(groups)
        block = blocks[min(max(attention, 0), len(blocks) - 1)]
        where = f"step {min(step, len(way.groups))}, self-attention {blocks.index(block)}"
        parts.append(groups_figure(way.canvas, groups[block].astype(np.int64), f"{way.title}, {where}", ""))
    if not parts:
        return section("steps", '<p class="hint">Draw first: then any step can be looked at.</p>')
    hint = '<p class="hint lit" role="status" aria-live="polite">Click a patch: its group lights up.</p>'
    return section("steps", hint, figures(parts))
