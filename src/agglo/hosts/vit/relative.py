"""Relative position bias for merged tokens: each takes the size-weighted mean of its members' rows and columns.

With S (B, G, T) the shares of the T first tokens in the G tokens at hand, whose rows sum to 1, a table b (H, T, T)
becomes S b S^T: as a query a merged token has the mean of its members' rows, as a key the mean of their columns. The
bias between two merged tokens is then the mean over all pairs of their members. Where tokens are mixed softly, the
shares are those of the mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from agglo.grouping import Grouping


@dataclass(frozen=True)
class RelativeBias:
    """tables: of a block: its bias (1 or B, H or 1, T, T) between the first tokens, prefix tokens too; or one for all.
    shares: (B, G, T) of the first tokens in those at hand; None while they are these.
    """

    tables: Callable[[nn.Module], Tensor | None] | Tensor
    shares: Tensor | None = None

    def table(self, block: nn.Module) -> Tensor | None:
        """The bias between the tokens at hand: the library's table itself, or (B, H or 1, G, G) for merged tokens."""
        table = self.tables if isinstance(self.tables, Tensor) else self.tables(block)
        if table is None or self.shares is None:
            return table
        with torch.autocast(table.device.type, enabled=False):
            shares = self.shares.unsqueeze(1)
            return (shares @ table.float() @ shares.transpose(-2, -1)).to(table.dtype)

    def merged(self, grouping: Grouping, weights: Tensor | None = None) -> RelativeBias:
        """The same after a merge. weights: (B, K, N), of the patch tokens in the new ones, where they are mixed."""
        batch, n_tokens = grouping.labels.shape
        shares = self.shares
        if shares is None:
            shares = torch.eye(n_tokens, device=grouping.labels.device).expand(batch, -1, -1)
        if weights is None:
            return replace(self, shares=grouping.merge(shares))
        mixed = weights.detach().float()
        mixed = mixed / mixed.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        front = grouping.prefix
        with torch.autocast(mixed.device.type, enabled=False):
            return replace(self, shares=torch.cat([shares[:, :front], mixed @ shares[:, front:]], dim=1))
