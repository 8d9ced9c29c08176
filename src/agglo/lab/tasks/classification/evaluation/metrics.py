"""Accuracy of a classifier in percent, and the speed of the model alone, in one pass over images.

The metrics take batches in any order and of any size. They are not torchmetrics': there a logit that is not a number
counts as the highest, ties among the five highest go by no rule, and average precision goes through a sigmoid where a
batch happens to have values outside of 0 to 1, which makes large logits equal.
"""

from __future__ import annotations

from collections import Counter
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


class TopK:
    """Fraction of images whose class is among the k highest logits: "top1", and "top5" where there are more classes.

    An image whose class shares its logit with others counts as first among them only if its index is lowest.
    """

    def __init__(self) -> None:
        self._correct: Counter[int] = Counter()
        self._total = 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, classes), targets (B,)."""
        classes = logits.shape[1]
        own = logits.gather(1, targets[:, None])
        before = torch.arange(classes, device=logits.device) < targets[:, None]
        rank = ((logits > own) | ((logits == own) & before)).sum(dim=1)
        # NaN beats nothing and nothing beats it: without this it would be correct.
        rank = rank.masked_fill(own.isnan()[:, 0], classes)
        for k in (1, 5) if classes > 5 else (1,):
            self._correct[k] += int((rank < k).sum())
        self._total += len(targets)

    def compute(self) -> dict[str, float]:
        return {f"top{k}": 100 * correct / self._total for k, correct in self._correct.items()}


class MeanAveragePrecision:
    """Mean average precision ("mAP") over classes; a class that no image shows counts as 0, as in the paper.

    Average precision of a class: images sorted by falling score, the mean over its positives of the precision
    among all images that score at least as high. No interpolation; equal scores stand or fall together, so that the
    order of the images does not matter. Scores are logits: a sigmoid would change no order, and lose some.
    """

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, classes), targets (B, classes) of 0 and 1."""
        self._logits.append(logits.detach().float().cpu())
        self._targets.append(targets.detach().bool().cpu())

    def compute(self) -> dict[str, float]:
        columns = zip(torch.cat(self._logits).T, torch.cat(self._targets).T, strict=True)
        per_class = torch.stack([average_precision(*column) for column in columns])
        return {"mAP": 100 * float(per_class.nan_to_num(0).mean())}


def average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the average precision of scores (N,) for positives (N,) bool; NaN without positives."""
    scores, order = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True)
    hits = positive[order]
    # Equal scores are seen at once: each position counts all images up to the last of its equals.
    _, lengths = scores.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    precision = hits.cumsum(0)[ends - 1].double() / ends
    return precision[hits].mean()


def metric_for(multi_label: bool) -> TopK | MeanAveragePrecision:
    """Return a new metric, the one that the study reports for a kind of data."""
    return MeanAveragePrecision() if multi_label else TopK()


def evaluate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    metric: TopK | MeanAveragePrecision,
    *,
    accelerator: Accelerator | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Return what the metric finds, "images", and "images_per_second" of the model alone: no decoding, no transfer.

    Args:
        model: A classifier, whose mode is put back at the end.
        loader: Batches of images and targets.
        metric: A new one, which keeps what it saw.
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
