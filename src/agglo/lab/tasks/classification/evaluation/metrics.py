"""Accuracy of a classifier in percent, and the speed of the model alone, in one pass over images.

The metrics are not torchmetrics': there a logit that is not a number counts as the highest, ties among the five highest
go by no rule, and average precision goes through a sigmoid where a batch happens to have values outside of 0 to 1,
which makes large logits equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agglo.models.outputs import logits_in
from agglo.utils.timing import timed_pass

if TYPE_CHECKING:
    from accelerate import Accelerator


def ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Return how many classes each image's own class (B,) comes after, by logits (B, classes).

    Of classes with equal logits the lowest comes first.
    """
    classes = logits.shape[1]
    own = logits.gather(1, targets[:, None])
    before = torch.arange(classes, device=logits.device) < targets[:, None]
    rank = ((logits > own) | ((logits == own) & before)).sum(dim=1)
    # NaN beats nothing and nothing beats it: without this it would be correct.
    return rank.masked_fill(own.isnan()[:, 0], classes)


def mean_average_precision(logits: Tensor, targets: Tensor) -> float:
    """Return the mean average precision over classes; a class that no image shows counts as 0, as in the paper.

    Args:
        logits: (B, classes); a sigmoid would change no order, and lose some.
        targets: (B, classes) of 0 and 1.
    """
    per_class = [average_precision(*column) for column in zip(logits.T, targets.T.bool(), strict=True)]
    return float(torch.stack(per_class).nan_to_num(0).mean())


def average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the average precision of scores (N,) for positives (N,) bool; NaN without positives.

    It is the mean over the positives of the precision among all images that score at least as high, so that the order
    of images with equal scores does not matter.
    """
    scores, order = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True)
    hits = positive[order]
    # Equal scores are seen at once: each position counts all images up to the last of its equals.
    _, lengths = scores.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    precision = hits.cumsum(0)[ends - 1].double() / ends
    return precision[hits].mean()


def evaluate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    accelerator: Accelerator | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Return "top1" and "top5", or "mAP", "images", and "images_per_second" of the model alone.

    Args:
        model: A classifier, whose mode is put back at the end.
        loader: Batches of images and targets: classes (B,), or 0 and 1 for several labels per image (B, classes).
        accelerator: The Accelerator of a run on several processes; the loader is then what its `prepare` returned.
            Every process returns the numbers of all images.
        prepare: Applied to inputs on the model's device before it runs, such as normalisation; not timed.
        advance: Called with the number of images done after each batch.

    The speed is the median over batches, so that a machine that stalls now and then does not spoil it, without the
    first one, which compiles kernels and fills caches; a batch that is alone runs twice. Speeds of several processes
    add up.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    speeds: list[float] = []
    seen: list[tuple[Tensor, ...]] = []
    try:
        with torch.inference_mode():
            for inputs, targets in loader:
                inputs, targets = inputs.to(like.device), targets.to(like.device)
                inputs = (inputs if prepare is None else prepare(inputs)).to(like.dtype)
                spent, logits = _run(model, inputs, accelerator)
                speeds.append(len(inputs) / spent)
                if accelerator is not None:
                    logits, targets = accelerator.gather_for_metrics((logits, targets))
                several = targets.dim() == 2
                found = (logits.float(), targets) if several else (ranks(logits, targets),)
                seen.append(tuple(part.cpu() for part in found))
                if advance is not None:
                    advance(len(targets))
            if not seen:
                raise ValueError("data has no images")
            if len(speeds) == 1:
                speeds.append(len(inputs) / _run(model, inputs, accelerator)[0])
    finally:
        model.train(was_training)
    speed = median(speeds[1:] or [0.0])
    if accelerator is not None:
        speed = float(accelerator.reduce(torch.tensor([speed], device=like.device), "sum"))
    columns = [torch.cat(parts) for parts in zip(*seen, strict=True)]
    images = len(columns[0])
    if several:
        quality = {"mAP": 100 * mean_average_precision(*columns)}
    else:
        largest = (1, 5) if logits.shape[1] > 5 else (1,)
        quality = {f"top{k}": 100 * int((columns[0] < k).sum()) / images for k in largest}
    return {**quality, "images": images, "images_per_second": speed}


def _run(model: nn.Module, inputs: Tensor, accelerator: Accelerator | None) -> tuple[float, Tensor]:
    with nullcontext() if accelerator is None else accelerator.autocast():
        spent, answer = timed_pass(model, inputs)
    return spent, logits_in(answer)
