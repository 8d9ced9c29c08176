"""The same seed by a diffusion model dense, with ToMe and with ATC, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agglo.drawing.groups import Ints, Pixels, first_members
from agglo.patching import apply, reduction, remove, trace
from agglo.playground.lending import Lent
from agglo.playground.settings import Chosen
from agglo.playground.streaming import streamed
from agglo.synthesis.data.requests import Request
from agglo.synthesis.evaluation.generators import Generator
from agglo.synthesis.evaluation.sheets import panel_pixels
from agglo.tracing import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

Labels = NDArray[np.signedinteger[Any]]
MOST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Column:
    """One of the ways, as far as it has come.

    picture: (H, W, 3), what the model has in mind; None before the first step, and where a model does not show it.
    done: steps. seconds: of all steps; None until the last one is done. difference: mean absolute one to the dense
    picture, in bytes; None without both. tokens: of each self-attention. refused: why there is no picture.
    groups: by step and self-attention, the group of every token (h, w); empty for the dense model.
    canvas: the picture as far as tokens reach.
    """

    title: str
    line: str
    done: int = 0
    picture: Pixels | None = None
    seconds: float | None = None
    difference: float | None = None
    tokens: list[int] = field(default_factory=list)
    gflops: float | None = None
    refused: str | None = None
    groups: list[dict[int, Labels]] = field(default_factory=list)
    canvas: Pixels | None = None


@dataclass(frozen=True)
class Kept:
    """What is left of a way once it is drawn, for its groups to be looked at; see `Column`. It stays while its visitor
    does, with those of all others: it holds nothing else."""

    title: str
    canvas: Pixels
    groups: list[dict[int, Labels]]


@dataclass(frozen=True)
class Drawn:
    """All ways side by side. steps: of one picture. done: of all steps of all ways, 0 to 1."""

    steps: int
    columns: list[Column]

    @property
    def done(self) -> float:
        ways = [column for column in self.columns if column.refused is None]
        return sum(column.done for column in ways) / (self.steps * len(ways)) if ways else 1.0

    @property
    def kept(self) -> list[Kept]:
        """Of all ways that have groups."""
        return [
            Kept(column.title, column.canvas, column.groups)
            for column in self.columns
            if any(column.groups) and column.canvas is not None
        ]


def draw(generators: Lent[Generator], request: Request, chosen: Sequence[Chosen]) -> Iterator[Drawn]:
    """The request dense and in each way, one after the other: what there is after every step, and at last all of it."""
    if not 0 <= request.seed <= MOST_SEED:
        raise ValueError(f"seed={request.seed} must lie in 0 to {MOST_SEED}")

    def work(say: Callable[[Drawn], None]) -> None:
        with generators.borrowed() as generator:
            columns = [Column("dense", "agglo.remove(model)"), *(Column(each.title, each.line) for each in chosen)]
            ways: list[Mapping[str, Any] | None] = [None, *(each.arguments for each in chosen)]

            def show(number: int, column: Column) -> None:
                columns[number] = column
                say(Drawn(generator.steps, list(columns)))

            try:
                for number, arguments in enumerate(ways):
                    _run(generator, request, arguments, columns[number], partial(show, number))
                    columns[number] = _compared(columns[number], columns[0])
                say(Drawn(generator.steps, list(columns)))
            finally:
                remove(generator.reduced)

    return streamed(work)


def _run(
    generator: Generator,
    request: Request,
    arguments: Mapping[str, Any] | None,
    column: Column,
    show: Callable[[Column], None],
) -> None:
    def after_step(step: int, picture: Image | None) -> None:
        nonlocal column
        column = replace(column, done=min(step, generator.steps), picture=None if picture is None else _pixels(picture))
        show(column)

    remove(generator.reduced)
    record = None
    begin = time.perf_counter()
    try:
        if arguments is None:
            [image] = generator([request], after_step)
        else:
            apply(generator.reduced, **arguments)
            with trace(generator.reduced, passes=generator.steps) as record:
                [image] = generator([request], after_step)
    except ValueError as error:
        show(replace(column, refused=str(error)))
        return
    seconds = time.perf_counter() - begin
    found = reduction(generator.reduced)
    column = replace(
        column,
        done=generator.steps,
        picture=_pixels(image),
        canvas=_pixels(generator.canvas(image)),
        seconds=seconds,
        tokens=[] if found is None or found.counts is None else found.counts,
        gflops=None if found is None else found.gflops_after,
        groups=[] if record is None else _groups(record, generator.canvas(image).size),
    )
    show(column)


def _pixels(image: Image) -> Pixels:
    return panel_pixels(image)


def _compared(column: Column, dense: Column) -> Column:
    if column is dense or column.picture is None or dense.picture is None:
        return column
    difference = np.abs(column.picture.astype(int) - dense.picture.astype(int)).mean()
    return replace(column, difference=float(difference))


def _groups(record: Trace, size: tuple[int, int]) -> list[dict[int, Labels]]:
    """By step and self-attention: of a guided model the groups of the prompted half, which comes last."""
    return [
        {step.block: _on_grid(first_members(step.total.labels[-1:, step.total.prefix :])[0], size) for step in steps}
        for steps in record.passes
    ]


def _on_grid(labels: Ints, size: tuple[int, int]) -> Labels:
    """Labels of tokens that fill a picture of (width, height), as (h, w), in the smallest type that holds them: there
    are many steps and many self-attentions."""
    width, height = size
    rows = round((len(labels) * height / width) ** 0.5)
    return labels.reshape(rows, -1).astype(np.min_scalar_type(-len(labels)))  # they reach from -1 to len - 1
