"""Which group each token belongs to, how many patches each group stands for, and the way there and back.

A token may also belong to no group: it is dropped, its label is -1. `merge` leaves it out, and `unmerge` puts at its
position whatever value it is given: hosts give the last one the token had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.checks import choice
from agglo.clustering import gpu
from agglo.clustering.merge import kernels as merge_kernels
from agglo.clustering.merge import means as group_means
from agglo.compiling import takes_kernels

Mean = Literal["plain", "preserve_norm"]
MEANS: tuple[Mean, ...] = ("plain", "preserve_norm")


@dataclass(frozen=True)
class Grouping:
    """The groups of a batch of token sequences; every prefix token, at the front, is one group.

    labels: (B, T) int64, the group of every token, -1 if it is dropped; labels[:, :prefix] is 0, 1, ..., prefix - 1.
    sizes: (B, G) float32, how many original tokens each group stands for; 0 marks a group that only pads.
    prefix: how many tokens at the front are never merged.
    weights: (B, T) float32, how many original tokens each token stood for before; None means one each.
    counts: (B,) int64, groups per image without prefix and padding; None means G - prefix everywhere.
    drops: whether labels may be -1.
    chosen: (B, G) int64, where every group is one token: its position, anything for padding; merging then only gathers.

    >>> pairs = Grouping.of(torch.tensor([[0, 0, 1]]), n_groups=2)
    >>> pairs.merge(torch.tensor([[[1.0], [3.0], [5.0]]])).tolist()
    [[[2.0], [5.0]]]
    """

    labels: Tensor
    sizes: Tensor
    prefix: int = 0
    weights: Tensor | None = None
    counts: Tensor | None = None
    drops: bool = False
    chosen: Tensor | None = None

    @staticmethod
    def of(
        patch_labels: Tensor,
        n_groups: int,
        prefix: int = 0,
        weights: Tensor | None = None,
        counts: Tensor | None = None,
        drops: bool = False,
    ) -> Grouping:
        """Return a grouping from labels (B, T - prefix) of the patch tokens alone, numbered from 0.

        drops: whether some labels are -1, for tokens to be dropped.

        >>> grouping = Grouping.of(torch.tensor([[0, 0, 1]]), n_groups=2, prefix=1)
        >>> grouping.labels, grouping.sizes
        (tensor([[0, 1, 1, 2]]), tensor([[1., 2., 1.]]))
        """
        _require("patch_labels", patch_labels, (None, None), torch.int64)
        batch, n_patches = patch_labels.shape
        _require("weights", weights, (batch, prefix + n_patches))
        _require("counts", counts, (batch,))
        if takes_kernels(patch_labels, weights) and (weights is None or weights.dtype == torch.float32):
            numbers = patch_labels.contiguous().numpy()
            labels, sizes, _ = merge_kernels().group(numbers, n_groups, prefix, weights)
            return Grouping(labels, sizes, prefix, weights, counts, drops)
        device = patch_labels.device
        shifted = torch.where(patch_labels < 0, -1, patch_labels + prefix) if drops else patch_labels + prefix
        labels = torch.cat([torch.arange(prefix, device=device).expand(batch, prefix), shifted], dim=1)
        added = torch.ones(batch, prefix + n_patches, device=device) if weights is None else weights
        added = added * (labels >= 0) if drops else added
        target = labels.clamp(min=0) if drops else labels
        sizes = torch.zeros(batch, prefix + n_groups, device=device).scatter_add(1, target, added)
        return Grouping(labels, sizes, prefix, weights, counts, drops)

    @staticmethod
    def select(
        positions: Tensor,
        n_patches: int,
        prefix: int = 0,
        weights: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Grouping:
        """Keep the patches at positions (B, K), counted without prefix, as they are, and drop all others.

        counts: (B,), how many of the K are meant; those after them only pad.

        >>> Grouping.select(torch.tensor([[0, 2]]), n_patches=4, prefix=1).labels
        tensor([[ 0,  1, -1,  2, -1]])
        """
        _require("positions", positions, (None, None), torch.int64)
        batch, n_kept = positions.shape
        _require("weights", weights, (batch, prefix + n_patches))
        _require("counts", counts, (batch,))
        device, total = positions.device, prefix + n_patches
        chosen = torch.cat([torch.arange(prefix, device=device).expand(batch, prefix), positions + prefix], dim=1)
        numbers = torch.arange(prefix + n_kept, device=device).expand(batch, -1)
        sizes = torch.ones(batch, prefix + n_kept, device=device) if weights is None else weights.gather(1, chosen)
        target = chosen
        if counts is not None:
            padding = numbers >= prefix + counts.unsqueeze(1)
            sizes = sizes.masked_fill(padding, 0)
            target = chosen.masked_fill(padding, total)  # one column beyond the tokens, cut off below
        labels = torch.full((batch, total + 1), -1, dtype=torch.int64, device=device).scatter(1, target, numbers)
        return Grouping(labels[:, :total], sizes, prefix, weights, counts, drops=True, chosen=chosen)

    @staticmethod
    def identity(tokens: Tensor, prefix: int = 0) -> Grouping:
        """Return the grouping of tokens (B, T, C) in which every token is a group."""
        labels = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        return Grouping(labels, torch.ones(tokens.shape[:2], device=tokens.device), prefix)

    @property
    def n_groups(self) -> int:
        """Groups in the tensors: prefix, patch groups, and any padding."""
        return self.sizes.shape[1]

    def merge(self, x: Tensor, mean: Mean = "plain") -> Tensor:
        """Return one token per group: the size-weighted mean of x (B, T, C) as (B, G, C), in the dtype of x.

        mean: "plain", or "preserve_norm": a mean is shorter than its members, which point in different directions, and
            is stretched to the size-weighted mean of their lengths; a mean of zero, which has no direction, stays zero.

        Sums are taken in float32 whatever the dtype. Padding groups are zero. Dropped tokens go nowhere. Prefix tokens,
        and groups for which one token is chosen, are the very tokens.

        >>> Grouping.of(torch.tensor([[0, 0]]), n_groups=1).merge(torch.tensor([[[2.0, 0.0], [0.0, 2.0]]]))
        tensor([[[1., 1.]]])
        """
        if mean not in MEANS:
            choice("mean", mean, MEANS)
        _require("x", x, (*self.labels.shape, None))
        if self.chosen is not None:
            kept = x.gather(1, self.chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            return kept if self.counts is None else kept.masked_fill((self.sizes == 0).unsqueeze(-1), 0)
        if mean == "plain" and self._sums_in_order(x):
            return group_means(x, self.labels, self.sizes, self.weights)
        x32 = x.float()
        if takes_kernels(x32, self.labels, self.weights, self.sizes):
            stretches = mean == "preserve_norm"
            merged = merge_kernels().means(x32, self.labels, self.weights, self.sizes, self.prefix, stretches)
            return merged.to(x.dtype)
        means = self._means(x32)
        if mean == "preserve_norm":
            means = means * self._stretch(x32, means)
        return means.to(x.dtype)

    def _means(self, x: Tensor) -> Tensor:
        """Return the size-weighted means (B, G, C) of float32 x (B, T, C)."""
        if self._sums_in_order(x):
            return group_means(x, self.labels, self.sizes, self.weights)
        weighted = x if self.weights is None else x * self.weights.unsqueeze(-1)
        labels = torch.where(self.labels < 0, self.n_groups, self.labels) if self.drops else self.labels
        # int: TorchScript cannot add a bool to a count that it traces.
        sums = _sums_of_groups(weighted, labels, self.n_groups + int(self.drops))[:, : self.n_groups]
        return sums.div_(self.sizes.clamp(min=1).unsqueeze(-1))

    def _sums_in_order(self, x: Tensor) -> bool:
        """Return whether the kernel for CUDA sums x, in the order of the tokens; its gradient is that of x alone."""
        return gpu.takes(x) and not any(t is not None and t.requires_grad for t in (self.sizes, self.weights))

    def _stretch(self, x: Tensor, means: Tensor) -> Tensor:
        """Return how much longer (B, G, 1) than the means their members in x (B, T, C) are; 1 for prefix tokens."""
        lengths = self._means(torch.linalg.vector_norm(x, dim=-1, keepdim=True))[:, self.prefix :]
        reached = torch.linalg.vector_norm(means, dim=-1, keepdim=True)[:, self.prefix :]
        return F.pad(lengths / torch.where(reached > 0, reached, 1.0), (0, 0, self.prefix, 0), value=1.0)

    def unmerge(self, y: Tensor, dropped: Tensor | None = None) -> Tensor:
        """Return one token per original position, (B, G, C) -> (B, T, C), every member a copy of its group.

        dropped: (B, T, C), what stands where a token was dropped; zeros if not given.
        """
        _require("y", y, (*self.sizes.shape, None))
        _require("dropped", dropped, (*self.labels.shape, y.shape[-1]))
        labels = self.labels.clamp(min=0) if self.drops else self.labels
        copies = _rows(y, labels)
        if not self.drops:
            return copies
        instead = torch.zeros_like(copies) if dropped is None else dropped
        return torch.where((self.labels < 0).unsqueeze(-1), instead, copies)

    def then(self, later: Grouping) -> Grouping:
        """Return this grouping followed by one of its groups, as one step from the first tokens to the last groups.

        >>> first = Grouping.of(torch.tensor([[0, 0, 1, 2]]), n_groups=3)
        >>> first.then(Grouping.of(torch.tensor([[0, 1, 1]]), n_groups=2, weights=first.sizes)).labels
        tensor([[0, 0, 1, 1]])
        """
        _require("labels of the later grouping", later.labels, tuple(self.sizes.shape))
        if later.prefix != self.prefix:
            raise ValueError(f"the later grouping has prefix={later.prefix}; needed: {self.prefix}, as before")
        labels = later.labels.gather(1, self.labels.clamp(min=0) if self.drops else self.labels)
        labels = labels.where(self.labels >= 0, -1) if self.drops else labels
        return Grouping(labels, later.sizes, self.prefix, self.weights, later.counts, self.drops or later.drops)

    def with_more_prefix_tokens(self, n_more: int) -> Grouping:
        """Return the same with so many more prefix tokens before all others."""
        batch, device = self.labels.shape[0], self.labels.device
        front = torch.arange(n_more, device=device).expand(batch, -1)
        ones = torch.ones(batch, n_more, device=device)
        labels = torch.where(self.labels < 0, -1, self.labels + n_more)
        return replace(
            self,
            labels=torch.cat([front, labels], dim=1),
            sizes=torch.cat([ones, self.sizes], dim=1),
            prefix=self.prefix + n_more,
            weights=None if self.weights is None else torch.cat([ones, self.weights], dim=1),
            chosen=None if self.chosen is None else torch.cat([front, self.chosen + n_more], dim=1),
        )


def _require(name: str, tensor: Tensor | None, shape: tuple[int | None, ...], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless a given tensor has the shape, None standing for any length, and the dtype.

    Not in graphs that are compiled or traced: sizes need not be plain numbers there.
    """
    if tensor is None or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(wanted not in (None, n) for wanted, n in zip(shape, found, strict=True)):
        needed = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} has the shape {found}; needed: ({needed})")
    if dtype not in (None, tensor.dtype):
        raise ValueError(f"{name} is {tensor.dtype}; needed: {dtype}")


def _rows(y: Tensor, labels: Tensor) -> Tensor:
    """Return the row of y (B, G, C) that each of the labels (B, T) names: (B, T, C).

    On a CPU whole rows at once: for (64, 98, 192) to 196 tokens 0.4 ms on one thread, against 7 by gather, whose index
    is as large as its result.
    """
    if y.device.type != "cpu" or torch.onnx.is_in_onnx_export():
        return y.gather(1, labels.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
    batch, n_groups, channels = y.shape
    rows = labels + torch.arange(batch).unsqueeze(1) * n_groups
    return y.reshape(-1, channels).index_select(0, rows.flatten()).view(batch, labels.shape[1], channels)


def _sums_of_groups(x: Tensor, labels: Tensor, n_groups: int) -> Tensor:
    """Return the sums (B, G, C) of x (B, T, C) over the members of each group.

    index_add_ over the flattened batch: at (64, 196, 192) on two CPU threads 0.8 ms, against 1.8 for a one-hot matmul
    and 2.9 for scatter_add, whose index is as large as x; ONNX has only the last of them.
    """
    batch, _, channels = x.shape
    if torch.onnx.is_in_onnx_export():
        return x.new_zeros(batch, n_groups, channels).scatter_add(1, labels.unsqueeze(-1).expand_as(x), x)
    rows = torch.arange(batch, device=x.device).unsqueeze(1) * n_groups + labels
    sums = x.new_zeros(batch * n_groups, channels).index_add_(0, rows.flatten(), x.reshape(-1, channels))
    return sums.view(batch, n_groups, channels)
