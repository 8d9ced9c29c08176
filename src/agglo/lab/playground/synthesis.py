"""The same seed by a diffusion model, dense and under several reductions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from agglo.config import ReductionConfig
from agglo.drawing.groups import Ints, Pixels, first_members, grid_of
from agglo.lab.playground.settings import Result
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.generators import Generator
from agglo.lab.tasks.synthesis.evaluation.grid import panel_pixels
from agglo.patch import apply, remove, report, trace
from agglo.tracing import Trace
from agglo.utils.timing import stopwatch


@dataclass(frozen=True, kw_only=True)
class SynthesisResult(Result):
    """One image. Its counts are those of each self-attention."""

    image: Pixels | None = None  # (H, W, 3)
    canvas: Pixels | None = None  # the image as far as tokens reach
    steps: dict[int, Ints] = field(default_factory=dict)  # by 1-based step, groups (h, w) in the first self-attention

    def difference(self, other: SynthesisResult) -> float | None:
        """Return the mean absolute difference to another image, of 255; None without both."""
        if self.image is None or other.image is None:
            return None
        return float(np.abs(self.image.astype(int) - other.image.astype(int)).mean())


def draw(
    generator: Generator,
    request: Request,
    config: ReductionConfig | None,
    after_step: Callable[[int], None] = lambda step: None,
) -> SynthesisResult:
    """Draw an image, with the dense model if the config is None. The model is dense afterwards.

    `after_step` is called with the number of steps that are done.
    """
    try:
        if config is not None:
            apply(generator.reduced, config)
        found = report(generator.reduced)
        tracing = nullcontext(Trace()) if found is None else trace(generator.reduced, passes=generator.steps)
        with stopwatch() as taken, tracing as record:
            [image] = generator([request], after_step)
    except ValueError as error:
        return SynthesisResult(config=config, refused=str(error))
    finally:
        remove(generator.reduced)
    canvas, steps = generator.canvas(image), {}
    for number in sorted({0, len(record.passes) // 2, len(record.passes) - 1}):
        for step in record.passes[number : number + 1]:
            grouping = step[0].total
            # Of a guided model's two halves the prompted one comes last.
            labels = first_members(grouping.labels[-1:, grouping.prefix :])[0]
            steps[number + 1] = labels.reshape(grid_of(len(labels), (canvas.height, canvas.width)))
    return SynthesisResult(
        config=config,
        seconds=taken.seconds,
        counts=[] if found is None or found.counts is None else found.counts,
        image=panel_pixels(image),
        canvas=panel_pixels(canvas),
        steps=steps,
    )
