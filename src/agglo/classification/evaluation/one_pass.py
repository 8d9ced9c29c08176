"""One pass of a model over images: how good, and how fast the model alone was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agglo.classification.evaluation.metrics import MeanAveragePrecision, TopK
from agglo.experiments.evaluation.turns import timed_pass
from agglo.experiments.outputs import logits_in

if TYPE_CHECKING:
    from accelerate import Accelerator


def evaluate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    metric: TopK | MeanAveragePrecision,
    *,
    accelerator: Accelerator | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """What the metric finds, "images", and "images_per_second" of the model alone: no decoding, no transfer.

    metric: fresh; keeps what it saw.
    accelerator: of a run on several processes; loader is then what `accelerator.prepare` gave, model need not be.
        Every process returns the numbers of all images.
    prepare: what is done to inputs on the model's device before it runs, to normalise bytes say; not timed.
    advance: called with the number of images done after each batch.

    The speed is the median over batches, so that a machine that stalls now and then does not spoil it, without the
    first one, which compiles kernels and fills caches; a batch that is alone runs twice. Speeds of several processes
    add up.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    speeds: list[float] = []
    images = 0
    try:
        with torch.inference_mode():
            for inputs, targets in loader:
                inputs, targets = inputs.to(like.device), targets.to(like.device)
                inputs = (inputs if prepare is None else prepare(inputs)).to(like.dtype)
                spent, logits = _run(model, inputs, accelerator)
                speeds.append(len(inputs) / spent)
                if accelerator is not None:
                    logits, targets = accelerator.gather_for_metrics((logits, targets))
                metric.update(logits, targets)
                images += len(targets)
                if advance is not None:
                    advance(len(targets))
            if len(speeds) == 1:
                speeds.append(len(inputs) / _run(model, inputs, accelerator)[0])
    finally:
        model.train(was_training)
    speed = median(speeds[1:] or [0.0])
    if accelerator is not None:
        speed = float(accelerator.reduce(torch.tensor([speed], device=like.device), "sum"))
    return {**metric.compute(), "images": images, "images_per_second": speed}


def _run(model: nn.Module, inputs: Tensor, accelerator: Accelerator | None) -> tuple[float, Tensor]:
    with nullcontext() if accelerator is None else accelerator.autocast():
        spent, answer = timed_pass(model, inputs)
    return spent, logits_in(answer)
