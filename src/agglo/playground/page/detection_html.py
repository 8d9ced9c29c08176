"""Detection as HTML."""

from __future__ import annotations

from html import escape

from agglo.drawing.detections import Colour, draw_detections, draw_over_one_another
from agglo.drawing.groups import tokens
from agglo.playground.detection import Detected, Found, Pair
from agglo.playground.page.html import (
    CLICK_HINT,
    code,
    figure,
    figures,
    groups_figure,
    milliseconds,
    refused,
    section,
    table,
)

_SIDE = 336  # pixels that pictures have at least
DENSE, REDUCED = (47, 111, 176), (232, 134, 46)


def detected_html(found: Detected) -> str:
    """All of the Detection tab."""
    scale = max(1, _SIDE // min(found.pixels.shape[:2]))
    every = [found.dense] if found.reduced is None else [found.dense, found.reduced]
    present = sorted({int(label) for one in every for label in one.objects["labels"]})
    parts = []
    for one in every:
        drawn = draw_detections(found.pixels, one.objects, found.classes, scale=scale, least=0.0, present=present)
        parts.append(figure(drawn.pixels, f"{one.title}: {drawn.summary}", f"what the {one.title} detector finds"))
    if found.reduced is None:
        return section("detection", figures(parts), refused(found.refused or ""), code([found.line]))
    layers = [(found.dense.objects, DENSE), (found.reduced.objects, REDUCED)]
    both = draw_over_one_another(found.pixels, layers, scale=scale)
    parts.append(figure(both, "over one another: dense blue, reduced orange", "what both find, in one picture"))
    groups = _groups(found, scale)
    return section("detection", figures(parts), groups, _numbers(found), _pairs(found), code([found.line]))


def _groups(found: Detected, scale: int) -> str:
    """After every reduction."""
    if not found.stages:
        return ""
    assert found.reduced is not None
    stages = [
        groups_figure(found.pixels, labels, f"after block {block}", found.reduced.title, spans=found.spans, scale=scale)
        for block, labels in found.stages.items()
    ]
    return f"<h3>What each reduction left of {tokens(found.tokens)}</h3>{figures(stages)}{CLICK_HINT}"


def _swatch(colour: Colour) -> str:
    return f'<i class="swatch" style="background:rgb{colour}"></i>'


def _numbers(found: Detected) -> str:
    assert found.reduced is not None
    left = " → ".join(str(count) for count in (found.tokens, *found.counts.values()))
    blocks = ", ".join(map(str, found.counts))
    counts = " ".join(map(str, found.counts.values()))
    rows = [
        _row(found.dense, f"{found.tokens}", DENSE, found),
        _row(
            found.reduced,
            f'<span data-counts="{counts}">{left}</span> <small>(blocks {blocks})</small>',
            REDUCED,
            found,
        ),
    ]
    return table(
        ["", "objects", "patch tokens", "GFLOPs of the backbone", "time of this pass"], rows, "Numbers of this pass"
    )


def _row(one: Found, left: str, colour: Colour, found: Detected) -> list[str]:
    share = "" if one is found.dense else f" <small>({found.dense.seconds / one.seconds:.2f}x)</small>"
    gflops = "" if one.gflops is None else f"{one.gflops:.3f}"
    objects = f'<span class="objects">{len(one.objects["labels"])}</span>'
    time = f'<span class="time">{milliseconds(one.seconds)}</span>{share}'
    return [f"{_swatch(colour)} {escape(one.title)}", objects, left, gflops, time]


def _pairs(found: Detected) -> str:
    if not found.pairs:
        return '<p class="hint">Neither finds anything that sure.</p>'
    rows = [[escape(pair.name), _score(pair.dense), _score(pair.reduced), _overlap(pair)] for pair in found.pairs]
    return table(["object", "score, dense", "score, reduced", "overlap of the boxes"], rows, "Who found what")


def _score(score: float | None) -> str:
    return '<span class="differs">not found</span>' if score is None else f"{score:.2f}"


def _overlap(pair: Pair) -> str:
    return "" if pair.overlap is None else f"{pair.overlap:.0%}"
