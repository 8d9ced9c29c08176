"""Means of groups: kernels of the CPU, and a torch operator for CUDA.

The operator takes the same sum every time, and its gradient is a gather.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from agglo.clustering import gpu


@cache
def kernels() -> Any:
    """Return the CPU's kernels, which load when they are first needed."""
    from agglo.clustering.merge import cpu

    return cpu


@torch.library.custom_op("agglo::group_means", mutates_args=())
def means(x: Tensor, labels: Tensor, sizes: Tensor, weights: Tensor | None) -> Tensor:
    """Return the means (B, G, C) of x (B, T, C) for labels (B, T), -1 for none, and sizes (B, G), in the dtype of x.

    Sums of float32 in the order of the tokens, where index_add_ takes them as they come.
    """

    def by_kernel() -> Tensor:
        from agglo.clustering.merge import triton  # which need not be installed

        return triton.means(x, labels, sizes, weights)

    return gpu.attempt(by_kernel, partial(_by_adding, x, labels, sizes, weights))


def _by_adding(x: Tensor, labels: Tensor, sizes: Tensor, weights: Tensor | None) -> Tensor:
    batch, n_groups = sizes.shape
    own = torch.where(labels < 0, n_groups, labels) + torch.arange(batch, device=x.device)[:, None] * (n_groups + 1)
    rows = x.float() if weights is None else x.float() * weights.unsqueeze(-1)
    sums = torch.zeros(batch * (n_groups + 1), x.shape[2], device=x.device)
    sums = sums.index_add_(0, own.flatten(), rows.flatten(0, 1)).view(batch, n_groups + 1, -1)[:, :n_groups]
    return (sums / sizes.clamp(min=1).unsqueeze(-1)).to(x.dtype)


@means.register_fake
def _(x: Tensor, labels: Tensor, sizes: Tensor, weights: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], sizes.shape[1], x.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gather(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    labels, sizes, weights = ctx.saved_tensors
    group = labels.clamp(min=0)
    share = (labels >= 0) / sizes.clamp(min=1).gather(1, group)
    share = share if weights is None else share * weights
    of_token = gradient.gather(1, group.unsqueeze(-1).expand(-1, -1, gradient.shape[2]))
    return (of_token * share.unsqueeze(-1)).to(gradient.dtype), None, None, None


means.register_autograd(_gather, setup_context=_keep)
