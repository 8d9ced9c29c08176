"""The same seed by a diffusion model dense, with ToMe and with ATC, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agglo.config import ReductionConfig
from agglo.drawing.groups import Ints, Pixels, first_members
from agglo.lab.playground.settings import Chosen
from agglo.lab.playground.sharing import Locked, streamed
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.generators import Generator
from agglo.lab.tasks.synthesis.evaluation.sheets import panel_pixels
from agglo.patch import apply, remove, report, trace
from agglo.tracing import Trace
from agglo.utils.timing import stopwatch

if TYPE_CHECKING:
    from PIL.Image import Image

Labels = NDArray[np.signedinteger[Any]]
MOST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Groups:
    """The groups of a finished image. They stay in memory while their visitor does, so there is nothing else in it."""

    title: str
    canvas: Pixels  # the image as far as tokens reach
    steps: list[dict[int, Labels]]  # by step and self-attention, the group of every token (h, w)


@dataclass(frozen=True)
class Column:
    """One image, as far as it is drawn."""

    title: str
    line: str  # of Python, which applies the reduction
    done: int = 0  # steps
    image: Pixels | None = None  # (H, W, 3), what the model predicts; None before the first step, or if it is not shown
    seconds: float | None = None  # of all steps; None until the last one is done
    difference: float | None = None  # mean absolute difference to the dense image, of 255; None without both
    tokens: list[int] = field(default_factory=list)  # groups of each self-attention
    refused: str | None = None  # why there is no image
    groups: Groups | None = None  # None for the dense model, and until the last step is done


@dataclass(frozen=True)
class Drawn:
    """All images side by side."""

    steps: int  # of one image
    columns: list[Column]

    @property
    def done(self) -> float:
        """Fraction of all steps of all images."""
        drawn = [column for column in self.columns if column.refused is None]
        return sum(column.done for column in drawn) / (self.steps * len(drawn)) if drawn else 1.0

    @property
    def is_finished(self) -> bool:
        return all(column.refused is not None or column.seconds is not None for column in self.columns)

    @property
    def groups(self) -> list[Groups]:
        return [column.groups for column in self.columns if column.groups is not None]


def draw(generators: Locked[Generator], request: Request, chosen: Sequence[Chosen]) -> Iterator[Drawn]:
    """Draw the request dense and with each reduction, one after the other; yield what there is after every step."""
    if not 0 <= request.seed <= MOST_SEED:
        raise ValueError(f"seed={request.seed} must lie in 0 to {MOST_SEED}")

    def work(report_progress: Callable[[Drawn], None]) -> None:
        columns = [Column("dense", "agglo.remove(model)"), *(Column(each.title, each.line) for each in chosen)]
        with generators.use() as generator:

            def show(number: int, column: Column) -> None:
                columns[number] = column
                report_progress(Drawn(generator.steps, list(columns)))

            try:
                for number, config in enumerate([None, *(each.config for each in chosen)]):
                    column = _run(generator, request, config, columns[number], partial(show, number))
                    show(number, _compared(column, columns[0]) if number else column)
            finally:
                remove(generator.reduced)

    return streamed(work)


def _run(
    generator: Generator,
    request: Request,
    config: ReductionConfig | None,
    column: Column,
    show: Callable[[Column], None],
) -> Column:
    def after_step(step: int, image: Image | None) -> None:
        show(replace(column, done=min(step, generator.steps), image=None if image is None else panel_pixels(image)))

    remove(generator.reduced)
    record = None
    try:
        with stopwatch() as taken:
            if config is None:
                [image] = generator([request], after_step)
            else:
                apply(generator.reduced, config)
                with trace(generator.reduced, passes=generator.steps) as record:
                    [image] = generator([request], after_step)
    except ValueError as error:
        return replace(column, refused=str(error))
    applied = report(generator.reduced)
    return replace(
        column,
        done=generator.steps,
        image=panel_pixels(image),
        seconds=taken.seconds,
        tokens=[] if applied is None or applied.counts is None else applied.counts,
        groups=None if record is None else _groups(column.title, generator.canvas(image), record),
    )


def _compared(column: Column, dense: Column) -> Column:
    if column.image is None or dense.image is None:
        return column
    return replace(column, difference=float(np.abs(column.image.astype(int) - dense.image.astype(int)).mean()))


def _groups(title: str, canvas: Image, record: Trace) -> Groups | None:
    """Return the groups of every step; those of the prompted half, which comes last, if the model is guided."""
    steps = [
        {
            step.block: _on_grid(first_members(step.total.labels[-1:, step.total.prefix :])[0], canvas.size)
            for step in steps
        }
        for steps in record.passes
    ]
    return Groups(title, panel_pixels(canvas), steps) if any(steps) else None


def _on_grid(labels: Ints, size: tuple[int, int]) -> Labels:
    """Return labels of tokens that fill an image of (width, height) as (h, w), in the smallest type that holds them.

    There are many steps and many self-attentions.
    """
    width, height = size
    rows = round((len(labels) * height / width) ** 0.5)
    return labels.reshape(rows, -1).astype(np.min_scalar_type(-len(labels)))  # they reach from -1 to len - 1
