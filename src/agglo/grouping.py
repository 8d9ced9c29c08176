"""Which group each token belongs to, how many patches each group stands for, and the way there and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grouping:
    """The groups of a batch of token sequences, prefix tokens first, each of them a group of its own.

    labels: (B, T) int64, the group of every token; labels[:, :prefix] is 0, 1, ..., prefix - 1.
    sizes: (B, G) float32, how many original tokens each group stands for; 0 marks a group that only pads.
    prefix: how many tokens at the front are never merged.
    weights: (B, T) float32, how many original tokens each token stood for before; None means one each.
    counts: (B,) int64, groups of each image without prefix and padding; None means G - prefix everywhere.
    """

    labels: Tensor
    sizes: Tensor
    prefix: int = 0
    weights: Tensor | None = None
    counts: Tensor | None = None

    @staticmethod
    def of(
        patch_labels: Tensor,
        n_groups: int,
        prefix: int = 0,
        weights: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Grouping:
        """A grouping from labels (B, T - prefix) of the patch tokens alone, numbered from 0.

        >>> grouping = Grouping.of(torch.tensor([[0, 0, 1]]), n_groups=2, prefix=1)
        >>> grouping.labels, grouping.sizes
        (tensor([[0, 1, 1, 2]]), tensor([[1., 2., 1.]]))
        """
        batch, n_patches = patch_labels.shape
        device = patch_labels.device
        prefix_labels = torch.arange(prefix, device=device).expand(batch, prefix)
        labels = torch.cat([prefix_labels, patch_labels + prefix], dim=1)
        ones = torch.ones(batch, prefix + n_patches, device=device) if weights is None else weights
        sizes = torch.zeros(batch, prefix + n_groups, device=device).scatter_add(1, labels, ones)
        return Grouping(labels, sizes, prefix, weights, counts)

    @staticmethod
    def identity(batch: int, n_tokens: int, prefix: int = 0, device: torch.device | None = None) -> Grouping:
        """Every token its own group."""
        labels = torch.arange(n_tokens, device=device).expand(batch, n_tokens)
        return Grouping(labels, torch.ones(batch, n_tokens, device=device), prefix)

    @property
    def n_groups(self) -> int:
        """Groups in the tensors: prefix, patch groups, and any padding."""
        return self.sizes.shape[1]

    def merge(self, x: Tensor) -> Tensor:
        """One token per group: the size-weighted mean of x (B, T, C) as (B, G, C), in the dtype of x.

        Sums are taken in float32 whatever the dtype. Padding groups are zero.
        """
        x32 = x.float()
        weighted = x32 if self.weights is None else x32 * self.weights.unsqueeze(-1)
        sums = _sums_of_groups(weighted, self.labels, self.n_groups)
        return sums.div_(self.sizes.clamp(min=1).unsqueeze(-1)).to(x.dtype)

    def unmerge(self, y: Tensor) -> Tensor:
        """One token per original position: (B, G, C) -> (B, T, C), every member a copy of its group."""
        return y.gather(1, self.labels.unsqueeze(-1).expand(-1, -1, y.shape[-1]))

    def then(self, later: Grouping) -> Grouping:
        """This grouping followed by a grouping of its groups, as one step from the first tokens to the last groups.

        >>> first = Grouping.of(torch.tensor([[0, 0, 1, 2]]), n_groups=3)
        >>> first.then(Grouping.of(torch.tensor([[0, 1, 1]]), n_groups=2, weights=first.sizes)).labels
        tensor([[0, 0, 1, 1]])
        """
        labels = later.labels.gather(1, self.labels)
        return Grouping(labels, later.sizes, self.prefix, self.weights, later.counts)


def _sums_of_groups(x: Tensor, labels: Tensor, n_groups: int) -> Tensor:
    """The sum of x (B, T, C) over the members of each group, (B, G, C).

    index_add_ over the flattened batch: at (64, 196, 192) on two CPU threads 0.8 ms (1.2 with weights), against 1.8 for
    a one-hot matmul and 2.9 for scatter_add, whose index is as large as x; ONNX has only the last of them. In place on
    fresh zeros, since out of place it copies them first and takes 3 ms.
    """
    batch, _, channels = x.shape
    if torch.onnx.is_in_onnx_export():
        return x.new_zeros(batch, n_groups, channels).scatter_add(1, labels.unsqueeze(-1).expand_as(x), x)
    rows = torch.arange(batch, device=x.device).unsqueeze(1) * n_groups + labels
    sums = x.new_zeros(batch * n_groups, channels).index_add_(0, rows.flatten(), x.reshape(-1, channels))
    return sums.view(batch, n_groups, channels)
