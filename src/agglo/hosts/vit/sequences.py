"""Several sequences in one tensor of tokens: images of different sizes packed behind each other, or padded.

Sequences of one length go through the layers as one batch of their own, so that nothing is padded and every image is
reduced by its own number of patches. Padding is left out: its positions keep the value they had before the first
reduction, which nobody reads.

Where some layers attend within windows and others in the whole image, windows are the sequences: tokens merge within
their window, and layers that attend further are shown the keys and values of the other windows too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from agglo.hosts.vit.base import Parts, Projected
from agglo.hosts.vit.passing import Pass

_LENGTHS = ("cu_seqlens", "cu_seq_lens_q")


@dataclass(frozen=True)
class Sequences:
    """index: (b, n) places of the tokens of b sequences of n tokens among all (S), for every length there is.
    members: the numbers of these sequences, (b,).
    """

    index: Tensor
    members: Tensor


def boundaries(given: Mapping[str, Any]) -> Tensor | None:
    """Where the packed sequences that a layer attends within begin and end, (sequences + 1,), if they are packed."""
    for name in _LENGTHS:
        if isinstance(given.get(name), Tensor):
            return given[name].long()
    return None


def block_boundaries(mask: Tensor) -> Tensor:
    """The same from a mask (1, 1, S, S) that is open in blocks along its diagonal."""
    opens = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > torch.finfo(mask.dtype).min / 2
    starts = (~opens.diagonal(-1)).nonzero().flatten() + 1
    ends = starts.new_tensor([0]), starts, starts.new_tensor([mask.shape[-1]])
    return torch.cat(ends)


def packed(bounds: Tensor, kinds: Tensor | None = None) -> list[Sequences]:
    """Sequences between boundaries, those of equal length together. kinds: (sequences, k), further numbers in which
    sequences that go together must agree."""
    lengths = bounds[1:] - bounds[:-1]
    keys = lengths.unsqueeze(1) if kinds is None else torch.cat([lengths.unsqueeze(1), kinds], dim=1)
    found = []
    for key in torch.unique(keys, dim=0):
        members = (keys == key).all(dim=1).nonzero().flatten()
        if int(key[0]):
            found.append(Sequences(bounds[members, None] + torch.arange(int(key[0]), device=bounds.device), members))
    return found


def padded(real: Tensor) -> list[Sequences]:
    """The tokens (B, T) bool of a padded batch that are no padding, images with equally many together."""
    batch, n_tokens = real.shape
    places = torch.arange(batch * n_tokens, device=real.device).view(batch, n_tokens)
    counts, found = real.sum(dim=1), []
    for count in counts.unique().tolist():
        members = (counts == count).nonzero().flatten()
        if count:
            chosen = real[members]
            found.append(Sequences(places[members][chosen].view(len(members), count), members))
    return found


def real_tokens(mask: Tensor) -> Tensor | None:
    """Which tokens (B, T) a mask (B, 1, T or 1, T) shows as keys; None if it tells queries apart, but for padding."""
    opens = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    keys = opens[:, 0].any(dim=1)
    asks = keys.unsqueeze(2) if mask.shape[2] > 1 else torch.ones_like(keys[:, :1, None])
    return keys if bool(((opens[:, 0] == keys.unsqueeze(1)) | ~asks).all()) else None


class Split:
    """Sequences of several lengths on their way through the layers.

    Until the first of them is reduced, the library's layers run on all tokens. begin: of one batch of sequences, given
    its tokens (b, n, C), the `Pass`.
    """

    def __init__(
        self, x: Tensor, sequences: list[Sequences], begin: Callable[[Sequences, Tensor], Pass], bounds: Tensor | None
    ) -> None:
        self.x, self.sequences, self.bounds = x, sequences, bounds
        self.passes = [begin(each, self._tokens()[each.index]) for each in sequences]
        self.first = min((first_look(each) for each in self.passes), default=0)
        self.apart = False

    def run(self, index: int, layer: Any, parts: Parts, given: Mapping[str, Any]) -> None:
        """Run one layer for all sequences."""
        if index < self.first:
            self.x = parts.whole(layer, self.x, None)
            return
        if not self.apart:
            self.apart = True
            for each, run in zip(self.sequences, self.passes, strict=True):
                run.x = self._tokens()[each.index]
        others = self._others(index, layer, parts, given)
        for number, run in enumerate(self.passes):
            run.parts = _Apart(parts) if others is None else _Joint(parts, *others(number))
            run.block(index, layer)

    def full(self) -> Tensor:
        """All tokens, in the shape and order of the library."""
        if not self.apart:
            return self.x
        tokens = self._tokens()
        for each, run in zip(self.sequences, self.passes, strict=True):
            tokens = tokens.index_put((each.index,), run.full().to(tokens.dtype))
        return tokens.view(self.x.shape)

    def add(self, gain: Tensor) -> None:
        """Let all tokens have what every token gains, in the shape of the library."""
        self.x = self.x + gain
        flat = gain.expand(self.x.shape).reshape(-1, self.x.shape[-1])
        for each, run in zip(self.sequences, self.passes, strict=True):
            run.add(flat[each.index])

    def _tokens(self) -> Tensor:
        return self.x.reshape(-1, self.x.shape[-1])

    def _others(
        self, index: int, layer: Any, parts: Parts, given: Mapping[str, Any]
    ) -> Callable[[int], tuple[Tensor, Tensor, Tensor]] | None:
        """Where this layer attends beyond the sequences: of a batch of them, the keys and values of all sequences, and
        which of these to add to its own, as a bias (b, 1, 1, tokens)."""
        bounds = boundaries(given)
        if bounds is None or self.bounds is None or torch.equal(bounds, self.bounds):
            return None
        if not torch.isin(bounds, self.bounds).all():
            raise ValueError("a layer attends within windows that another one cuts through, which agglo cannot do")
        wider = torch.searchsorted(bounds, self.bounds[:-1], right=True) - 1  # of every sequence
        keys, values, weights, owners = [], [], [], []
        for each, run in zip(self.sequences, self.passes, strict=True):
            table = None if run.rotary is None else run.rotary.table(index)
            projected = parts.project(layer, run.x, table)
            sizes = run.sizes()
            shape = projected.k.shape
            sizes = torch.ones(shape[0], shape[2], device=run.x.device) if sizes is None else sizes
            keys.append(projected.k.transpose(0, 1).flatten(1, 2))
            values.append(projected.v.transpose(0, 1).flatten(1, 2))
            weights.append(sizes.float().log().flatten())
            owners.append(each.members.repeat_interleave(shape[2]))
        k, v = torch.cat(keys, dim=1), torch.cat(values, dim=1)  # (H, all tokens, d)
        weight, owner = torch.cat(weights), torch.cat(owners)

        def of(number: int) -> tuple[Tensor, Tensor, Tensor]:
            members = self.sequences[number].members.unsqueeze(1)
            seen = (wider[owner] == wider[members]) & (owner != members)
            bias = weight.where(seen, float("-inf"))[:, None, None]
            n = len(members)
            return k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1), bias

        return of


def first_look(run: Pass) -> int:
    """The first block at which a pass does more than run the library's layer."""
    if not run.asked:
        return len(run.targets)
    return max(0, run.asked[0] - 1)  # the one before may be asked about its attention


class _Apart(Parts):
    """A layer's parts, for tokens that the library's layer would not take as they are."""

    treats_images_alike = False
    never_whole = True

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def whole(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Tensor:
        raise NotImplementedError("never whole")

    def attend(self, block: nn.Module, projected: Projected, sizes: Tensor | None) -> Tensor | None:
        return self.parts.attend(block, projected, sizes)

    def project(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Projected:
        return self.parts.project(block, x, rotary)

    def join(self, block: nn.Module, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        return self.parts.join(block, x, attended, projected)

    def feed(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.parts.feed(block, x)


class _Joint(_Apart):
    """The same with keys and values of tokens elsewhere behind its own. bias: (b, 1, 1, others)."""

    def __init__(self, parts: Parts, k: Tensor, v: Tensor, bias: Tensor) -> None:
        super().__init__(parts)
        self.k, self.v, self.bias = k, v, bias

    def project(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Projected:
        own = self.parts.project(block, x, rotary)
        bias = torch.cat([self.bias.new_zeros(*self.bias.shape[:3], own.k.shape[2]), self.bias], dim=-1)
        return replace(
            own,
            k=torch.cat([own.k, self.k.to(own.k.dtype)], dim=2),
            v=torch.cat([own.v, self.v.to(own.v.dtype)], dim=2),
            features=own.k if own.features is None else own.features,
            bias=bias.expand(-1, -1, own.q.shape[2], -1),
        )
