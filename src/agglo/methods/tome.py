"""ToMe (Bolya et al., ICLR 2023), and as tomesd has it for diffusion models (CVPR workshops 2023)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.checks import choice, flag, number, whole_numbers
from agglo.compiling import outside_graphs
from agglo.grouping import MEANS, Mean
from agglo.methods.base import FEATURES, Grid, Method, Outcome, View, require_grid
from agglo.methods.registry import register


class PairMerging(Method):
    """Some tokens are paired off, so that at most half of them can go at one block.

    features: what tokens are compared by, as in ATC.
    """

    reach: ClassVar[str] = "0.5 and above; half of an odd count rounds up"

    def __init__(self, features: str = "keys") -> None:
        self.features = choice("features", features, FEATURES)

    def reachable(self, n_tokens: int, target: int) -> int:
        least = self.least(n_tokens)
        if target < n_tokens - least:
            raise ValueError(
                f"{self.name} cannot go from {n_tokens} to {target} patch tokens at one block: it merges pairs, so at "
                f"least {least} stay. Use keep rates of 0.5 or more, more blocks, or method='atc'"
            )
        return max(target, least)

    def least(self, n_tokens: int) -> int:
        return n_tokens - n_tokens // 2

    def directions(self, view: View) -> Tensor:
        """Return unit features (B, N, D), in float32, that tell how alike patch tokens are."""
        return F.normalize(view.features(self.features).float(), dim=-1)

    def matched(self, view: View) -> tuple[Tensor, Tensor]:
        """Return labels (B, N), and the tokens that stay (B, target), of ToMe's matching."""
        assert view.target is not None
        features = self.directions(view)
        n_merges = int(features.shape[1]) - view.target
        # The released code sorts the even tokens by position again only if a class token must come first.
        return match(features, n_merges, first_seeker=view.prefix % 2, by_similarity=view.prefix == 0)


@register
class ToMe(PairMerging):
    """Tokens at even positions (class token first) merge with their most similar token at an odd one, best pairs first.

    At most half of the tokens can go at one block. Afterwards they are in the order of the released code, on which the
    next block's split into even and odd depends: first the even ones that found no partner, then all odd ones.

    features: what tokens are compared by, as in ATC.
    mean: "plain", or "preserve_norm": a merged token is as long as its members are on average (`Grouping.merge`).
    """

    name: ClassVar[str] = "tome"
    reference: ClassVar[str] = "Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023"

    def __init__(self, features: str = "keys", mean: Mean = "plain") -> None:
        super().__init__(features)
        self.mean = choice("mean", mean, MEANS)

    def reduce(self, view: View) -> Outcome:
        return Outcome(view.group(self.matched(view)[0]), mean=self.mean)


def match(features: Tensor, n_merges: int, first_seeker: int = 0, by_similarity: bool = False) -> tuple[Tensor, Tensor]:
    """Return labels (B, N), and who stays (B, N - n_merges), after bipartite matching of unit features (B, N, D).

    Seekers are every second token from first_seeker on, the others stay. The n_merges seekers with the most similar
    stayer join it. Groups are numbered by the token that stays: first the seekers that are left, by position or most
    similar first, then the stayers.
    """
    batch, n_tokens, _ = features.shape
    positions = torch.arange(n_tokens, device=features.device)
    seekers, stayers = positions[first_seeker::2], positions[1 - first_seeker :: 2]
    with torch.autocast(features.device.type, enabled=False):
        similarity = features[:, first_seeker::2] @ features[:, 1 - first_seeker :: 2].transpose(1, 2)
    best, partner = similarity.max(dim=-1)
    most_similar_first = best.argsort(dim=-1, descending=True)  # (B, seekers), indices into seekers
    leaving, left = most_similar_first[:, :n_merges], most_similar_first[:, n_merges:]
    leader = positions.expand(batch, n_tokens).scatter(1, seekers[leaving], stayers[partner.gather(1, leaving)])
    left = left if by_similarity else left.sort(dim=1).values
    leaders = torch.cat([seekers[left], stayers.expand(batch, -1)], dim=1)  # (B, groups), positions
    numbers = torch.arange(n_tokens - n_merges, device=features.device).expand(batch, -1)
    return torch.zeros_like(leader).scatter(1, leaders, numbers).gather(1, leader), leaders


def numbered(leader: Tensor) -> Tensor:
    """Return labels (B, N) from the position of the token that each joins; one that stays joins itself.

    Groups are numbered by the token that stays, in order of position.

    >>> numbered(torch.tensor([[2, 1, 2, 1]]))
    tensor([[1, 0, 1, 0]])
    """
    positions = torch.arange(leader.shape[1], device=leader.device)
    return ((leader == positions).long().cumsum(dim=1) - 1).gather(1, leader)


@register
class ToMeSD(Method):
    """One token of each cell of the grid stays, and the others look for the most similar of these.

    The most similar pairs merge, as in tomesd.

    features: what tokens are compared by; the authors take the block's input.
    stride: (rows, columns) of a cell. Rows and columns that fill no cell look for a partner too.
    use_rand: whether the token that stays is drawn, the same for the whole batch, or the cell's first. As in tomesd it
        is the first for odd batches, where the two halves of classifier-free guidance cannot be together.
    seed: None draws from a copy of torch's generator that is made when a generation begins; a number starts from there.
    """

    name: ClassVar[str] = "tomesd"
    for_diffusion: ClassVar[bool] = True
    proportional: bool = False
    reference: ClassVar[str] = "Bolya and Hoffman, Token Merging for Fast Stable Diffusion, CVPR workshops 2023"

    def __init__(
        self, features: str = "tokens", stride: tuple[int, int] = (2, 2), use_rand: bool = True, seed: int | None = None
    ) -> None:
        self.features = choice("features", features, FEATURES)
        rows, columns = whole_numbers("stride", stride, minimum=1, length=2)
        self.stride = (rows, columns)
        self.use_rand = flag("use_rand", use_rand)
        self.seed = None if seed is None else number("seed", seed, whole=True)

    def stages(self, n_tokens: int, asked: Sequence[int], grid: Grid | None) -> list[int]:
        rows, columns = require_grid(self, grid, n_tokens)
        fewest = max(1, (rows // self.stride[0]) * (columns // self.stride[1]))
        if min(asked) < fewest:
            raise ValueError(
                f"tomesd cannot go from {rows} x {columns} tokens to {min(asked)}: one stays in each cell of "
                f"stride={self.stride}, {fewest} in all. Use a larger keep_rate or stride, or method='atc'"
            )
        return list(asked)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        features = F.normalize(view.features(self.features).float(), dim=-1)
        grid = require_grid(self, view.grid, int(features.shape[1]))
        cells = (grid[0] // self.stride[0], grid[1] // self.stride[1])
        # The index within its cell of the token that stays.
        chosen = torch.zeros(cells, dtype=torch.int64, device=features.device)
        if self.use_rand and features.shape[0] % 2 == 0:
            chosen = _draw(self, cells, self.stride[0] * self.stride[1], features.device)
        labels = join_nearest(features, destinations(grid, self.stride, chosen), view.target)
        return Outcome(view.group(labels))


class _Generators(threading.local):
    """The random generators of this thread, one for each method: by identity, since equal methods draw apart."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[ref[Method], torch.Generator]] = {}


_GENERATORS = _Generators()


@contextmanager
def fresh_generators() -> Iterator[None]:
    """Draw from new generators as long as this lasts: a generation does not depend on those before it."""
    before, _GENERATORS.known = _GENERATORS.known, {}
    try:
        yield
    finally:
        _GENERATORS.known = before


@outside_graphs
def _draw(method: ToMeSD, shape: tuple[int, int], n: int, device: torch.device) -> Tensor:
    """Draw numbers below n from the generator of this generation, outside of compiled code: graphs hold none."""
    known = _GENERATORS.known = {key: pair for key, pair in _GENERATORS.known.items() if pair[0]() is not None}
    _, generator = known.get(id(method), (None, None))
    if generator is None or (generator.device != device and device.type in ("cpu", "cuda")):
        on_device = device.type == "cuda"
        generator = torch.Generator(device if on_device else "cpu")
        if method.seed is not None:
            generator.manual_seed(method.seed)
        else:
            generator.set_state(torch.cuda.get_rng_state(device) if on_device else torch.get_rng_state())
        known[id(method)] = (ref(method), generator)
    numbers = torch.randint(n, size=(*shape, 1), device=generator.device, generator=generator)
    return numbers.squeeze(-1).to(device)


def destinations(grid: Grid, stride: tuple[int, int], chosen: Tensor) -> Tensor:
    """Return the positions (M,) of the tokens that stay, one for each cell, in ascending order.

    >>> destinations((2, 5), (2, 2), torch.tensor([[0, 3]]))
    tensor([0, 8])
    """
    down, right = stride
    rows = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1) * down + chosen // right
    columns = torch.arange(chosen.shape[1], device=chosen.device) * right + chosen % right
    return (rows * grid[1] + columns).flatten().sort().values


def join_nearest(features: Tensor, stayers: Tensor, target: int) -> Tensor:
    """Return labels (B, N) of unit features (B, N, D).

    Of the tokens that are not stayers (M,), the N - target with the most similar stayer join it. Groups are numbered by
    the token they are named after, in order of position.
    """
    batch, n_tokens, _ = features.shape
    positions = torch.arange(n_tokens, device=features.device)
    is_stayer = torch.zeros(n_tokens, dtype=torch.int64, device=features.device).scatter(0, stayers, 1)
    seekers = is_stayer.argsort(stable=True)[: n_tokens - stayers.shape[0]]
    with torch.autocast(features.device.type, enabled=False):
        similarity = features[:, seekers] @ features[:, stayers].transpose(1, 2)
    best, partner = similarity.max(dim=-1)
    leaving = best.topk(n_tokens - target, dim=-1).indices
    return numbered(positions.expand(batch, n_tokens).scatter(1, seekers[leaving], stayers[partner.gather(1, leaving)]))
