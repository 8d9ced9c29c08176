"""ToMe for Stable Diffusion (Bolya and Hoffman, CVPR workshops 2023): one destination per cell of the token grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.grouping import Grouping
from agglo.hosts.diffusion.graphs import outside_graphs
from agglo.hosts.diffusion.state import THREAD
from agglo.methods import Grid, Method, Outcome, View
from agglo.methods.base import require_grid
from agglo.methods.helpers.features import patch_features, require_known


class GridToMe(Method):
    """One token of each cell of the grid stays, and the others look for the most similar of these; the most similar
    pairs merge, as in tomesd.

    features: what tokens are compared by; the authors take the block's input.
    stride: (rows, columns) of a cell. Rows and columns that fill no cell look for a partner too.
    use_rand: whether the token that stays is drawn, the same for the whole batch, or the cell's first. As in tomesd it
        is the first for odd batches, where the two halves of classifier-free guidance cannot be together.
    seed: None draws from a copy of torch's generator that is made when a generation begins; a number starts from there.
    """

    name: ClassVar[str] = "tome"
    proportional: bool = False
    reference: ClassVar[str] = "Bolya and Hoffman, Token Merging for Fast Stable Diffusion, CVPR workshops 2023"

    def __init__(
        self,
        features: str = "tokens",
        stride: tuple[int, int] = (2, 2),
        use_rand: bool = True,
        seed: int | None = None,
    ) -> None:
        if len(stride) != 2 or min(stride) < 1:
            raise ValueError(f"stride={stride!r} must be two whole numbers from 1 on: rows and columns of a cell")
        self.features = require_known(features)
        self.stride = (int(stride[0]), int(stride[1]))
        self.use_rand, self.seed = use_rand, seed

    def options(self) -> dict[str, Any]:
        return {"features": self.features, "stride": self.stride, "use_rand": self.use_rand, "seed": self.seed}

    def stages(self, n_tokens: int, asked: Sequence[int], grid: Grid | None) -> list[int]:
        rows, columns = require_grid(self, grid, n_tokens)
        fewest = max(1, (rows // self.stride[0]) * (columns // self.stride[1]))
        if min(asked) < fewest:
            raise ValueError(
                f"tome cannot go from {rows} x {columns} tokens to {min(asked)}: one token stays in each cell of "
                f"{self.stride[0]} x {self.stride[1]}, {fewest} in all. Use a larger keep_rate or stride, or "
                "method='atc'"
            )
        return list(asked)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        features = F.normalize(patch_features(view, self.features).float(), dim=-1)
        grid = require_grid(self, view.grid, int(features.shape[1]))
        chosen = self._chosen(grid, features)
        labels = join_nearest(features, destinations(grid, self.stride, chosen), view.target)
        return Outcome(Grouping.of(labels, view.target))

    def _chosen(self, grid: Grid, features: Tensor) -> Tensor:
        """Which token of each cell stays, (rows of cells, columns of cells), counted within the cell."""
        shape = (grid[0] // self.stride[0], grid[1] // self.stride[1])
        if not self.use_rand or features.shape[0] % 2 == 1:
            return torch.zeros(shape, dtype=torch.int64, device=features.device)
        return _draw(self, shape, self.stride[0] * self.stride[1], features.device)


@outside_graphs
def _draw(method: GridToMe, shape: tuple[int, int], n: int, device: torch.device) -> Tensor:
    """Numbers below n, from the generator of this generation. Outside of compiled code: graphs hold no generator."""
    generator = THREAD.generator(method, method.seed, device)
    numbers = torch.randint(n, size=(*shape, 1), device=generator.device, generator=generator)
    return numbers.squeeze(-1).to(device)


def destinations(grid: Grid, stride: tuple[int, int], chosen: Tensor) -> Tensor:
    """Positions (M,) in ascending order of the tokens that stay, one for each cell.

    >>> destinations((2, 5), (2, 2), torch.tensor([[0, 3]]))
    tensor([0, 8])
    """
    down, right = stride
    rows = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1) * down + chosen // right
    columns = torch.arange(chosen.shape[1], device=chosen.device) * right + chosen % right
    return (rows * grid[1] + columns).flatten().sort().values


def join_nearest(features: Tensor, stayers: Tensor, target: int) -> Tensor:
    """Labels (B, N) of unit features (B, N, D): of the tokens that are not stayers (M,), the N - target with the most
    similar stayer join it. Groups are numbered by the token they are named after, in order of position."""
    batch, n_tokens, _ = features.shape
    positions = torch.arange(n_tokens, device=features.device)
    is_stayer = torch.zeros(n_tokens, dtype=torch.int64, device=features.device).scatter(0, stayers, 1)
    seekers = is_stayer.argsort(stable=True)[: n_tokens - stayers.shape[0]]
    with torch.autocast(features.device.type, enabled=False):
        similarity = features[:, seekers] @ features[:, stayers].transpose(1, 2)
    best, partner = similarity.max(dim=-1)
    leaving = best.topk(n_tokens - target, dim=-1).indices
    leader = positions.expand(batch, n_tokens).scatter(1, seekers[leaving], stayers[partner.gather(1, leaving)])
    number = (leader == positions).long().cumsum(dim=1) - 1
    return number.gather(1, leader)
