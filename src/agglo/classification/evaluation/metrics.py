"""How good the answers are, in percent: top-1 and top-5, or mean average precision for several labels per image.

Both take batches in any order and of any size; the result is the same. That is why they are not torchmetrics': there a
logit that is not a number counts as the highest, ties among the five highest go by no rule, and average precision goes
through a sigmoid where a batch happens to have values outside of 0 to 1, which makes large logits equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TopK:
    """Fraction of images whose class is among the k highest logits: "top1", and "top5" where there are more classes.

    An image whose class shares its logit with others counts as first among them only if its index is lowest.
    """

    def __init__(self) -> None:
        self._right: dict[int, int] = {}
        self._total = 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (B, classes), targets (B,)."""
        classes = logits.shape[1]
        own = logits.gather(1, targets[:, None])
        before = torch.arange(classes, device=logits.device) < targets[:, None]
        rank = ((logits > own) | ((logits == own) & before)).sum(dim=1)
        # Not a number beats nothing and nothing beats it: without this it would be right.
        rank = rank.masked_fill(own.isnan()[:, 0], classes)
        for k in (1, 5) if classes > 5 else (1,):
            self._right[k] = self._right.get(k, 0) + int((rank < k).sum())
        self._total += len(targets)

    def compute(self) -> dict[str, float]:
        if not self._total:
            raise ValueError("no image was evaluated")
        return {f"top{k}": 100 * right / self._total for k, right in self._right.items()}


class MeanAveragePrecision:
    """ "mAP": the mean over classes of the average precision; a class that no image shows counts as 0, as in the paper.

    Average precision of a class: images sorted by falling score, the mean over its positives of the precision
    among all images that score at least as high. No interpolation; equal scores stand or fall together, so that the
    order of the images does not matter. Scores are logits: a sigmoid would change no order, and lose some.
    """

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (B, classes), targets (B, classes) of 0 and 1."""
        self._logits.append(logits.detach().float().cpu())
        self._targets.append(targets.detach().bool().cpu())

    def per_class(self) -> Tensor:
        """(classes,) average precision, 0 to 1; NaN for a class that no image shows."""
        if not self._logits:
            raise ValueError("no image was evaluated")
        logits, targets = torch.cat(self._logits), torch.cat(self._targets)
        return torch.stack([average_precision(*column) for column in zip(logits.T, targets.T, strict=True)])

    def compute(self) -> dict[str, float]:
        return {"mAP": 100 * float(self.per_class().nan_to_num(0).mean())}


def average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    """scores (N,), positive (N,) bool -> a number, NaN without positives."""
    scores, order = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True)
    hits = positive[order]
    # Equal scores are seen at once: each place counts all images up to the last of its equals.
    _, lengths = scores.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    precision = hits.cumsum(0)[ends - 1].double() / ends
    return precision[hits].mean()


def metric_for(multi_label: bool) -> TopK | MeanAveragePrecision:
    """The metric that the study reports for a kind of data."""
    return MeanAveragePrecision() if multi_label else TopK()
