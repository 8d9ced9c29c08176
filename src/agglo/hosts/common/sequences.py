"""Several sequences in one tensor of tokens: images of different sizes packed behind each other, or padded.

Sequences of one length go through the layers as one batch, so that nothing is padded and every image is reduced by its
own number of patches. Padding is left out: its positions keep the value they had before the first reduction of any
image in the batch. Where some layers attend within windows and others in the whole image, windows are the sequences:
tokens merge within their window, and layers that attend further see the keys and values of the other windows too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.base import refusal
from agglo.hosts.common.blocks import AttentionInputs, Parts
from agglo.hosts.common.forward_pass import ForwardPass

_LENGTHS = ("cu_seqlens", "cu_seq_lens_q")


@dataclass(frozen=True)
class Sequences:
    """Sequences of one length: the positions (b, n) of their tokens among all, and their own numbers (b,)."""

    index: Tensor
    members: Tensor


def boundaries(given: Mapping[str, Any]) -> Tensor | None:
    """Return where the packed sequences that a block attends within begin and end, (sequences + 1,), if packed."""
    for name in _LENGTHS:
        if isinstance(given.get(name), Tensor):
            return given[name].long()
    return None


def block_boundaries(name: str, mask: Tensor) -> Tensor:
    """Return the same for a mask (1, 1, S, S), an argument of this name, that is open in blocks along its diagonal."""
    if mask.dim() != 4 or mask.shape[:2] != (1, 1):
        raise refusal(name)
    opens = _open(name, mask)[0, 0]
    starts_block = torch.cat([opens.new_ones(1), ~opens.diagonal(-1)])
    block = starts_block.cumsum(0)
    if not torch.equal(opens, block == block.unsqueeze(1)):
        raise refusal(name)
    return F.pad(starts_block.nonzero().flatten(), (0, 1), value=len(block))


def packed(bounds: Tensor, kinds: Tensor | None = None) -> list[Sequences]:
    """Return the sequences between boundaries, those of equal length, and of equal kinds (sequences, k), together."""
    lengths = bounds[1:] - bounds[:-1]
    keys = lengths.unsqueeze(1) if kinds is None else torch.cat([lengths.unsqueeze(1), kinds], dim=1)
    found = []
    for key in torch.unique(keys, dim=0):
        members = (keys == key).all(dim=1).nonzero().flatten()
        if int(key[0]):
            found.append(Sequences(bounds[members, None] + torch.arange(int(key[0]), device=bounds.device), members))
    return found


def padded(real: Tensor) -> list[Sequences]:
    """Return the tokens (B, T) bool of a padded batch that are no padding, images with equally many together."""
    batch, n_tokens = real.shape
    positions = torch.arange(batch * n_tokens, device=real.device).view(batch, n_tokens)
    counts, found = real.sum(dim=1), []
    for count in counts.unique().tolist():
        members = (counts == count).nonzero().flatten()
        if count:
            chosen = real[members]
            found.append(Sequences(positions[members][chosen].view(len(members), count), members))
    return found


def real_tokens(name: str, mask: Tensor) -> Tensor:
    """Return which tokens (B, T) are no padding by a mask (B, 1, T or 1, T), boolean or added to logits.

    A mask, an argument of this name, that tells queries apart or weighs keys raises ValueError.
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise refusal(name)
    opens = _open(name, mask)[:, 0]
    keys = opens.any(dim=1)
    queries = keys.unsqueeze(2) if mask.shape[2] > 1 else torch.ones_like(keys[:, :1, None])
    if ((opens != keys.unsqueeze(1)) & queries).any():
        raise refusal(name)
    return keys


def _open(name: str, mask: Tensor) -> Tensor:
    """Return where a mask, boolean or added to logits, lets attention through."""
    if mask.dtype == torch.bool:
        return mask
    opens = mask > torch.finfo(mask.dtype).min / 2
    if mask[opens].any():
        raise refusal(name)
    return opens


class Split:
    """Sequences of several lengths on their way through the blocks, one `ForwardPass` for each length.

    Until the first of them is reduced, the library's blocks run on all tokens.

    Args:
        x: All tokens, packed or padded.
        sequences: The sequences among them.
        begin: Begins the pass of some sequences with their tokens (b, n, C).
        bounds: Where packed sequences begin and end.
    """

    def __init__(
        self,
        x: Tensor,
        sequences: list[Sequences],
        begin: Callable[[Sequences, Tensor], ForwardPass],
        bounds: Tensor | None,
    ) -> None:
        self.x, self.sequences, self.bounds = x, sequences, bounds
        self.runs = [begin(each, self._tokens()[each.index]) for each in sequences]
        for run in self.runs:
            run.never_whole, run.front_only = True, False
        # A method may need the attention of the block before the first reduction.
        starts = [max(0, run.reducing[0] - 1) if run.reducing else len(run.targets) for run in self.runs]
        self.first = min(starts, default=0)
        self.apart = False

    def record(self) -> None:
        """Add the reductions of every pass to the traces that are open."""
        for run in self.runs:
            run.record()

    def block(self, index: int, block: nn.Module, parts: Parts, given: AttentionInputs) -> None:
        """Run one block for all sequences."""
        if index < self.first:
            self.x = parts.whole(block, self.x, None)
            return
        if not self.apart:
            self.apart = True
            for each, run in zip(self.sequences, self.runs, strict=True):
                run.x = self._tokens()[each.index]
        tables = [None if given.rotary is None else given.rotary[each.index[0]] for each in self.sequences]
        inputs = [replace(given, rotary=table) for table in tables]
        if self._attends_further(given.bounds):
            assert given.bounds is not None
            inputs = self._with_elsewhere(block, parts, inputs, given.bounds)
        for run, own in zip(self.runs, inputs, strict=True):
            run.block(index, block, parts, own)

    def full(self) -> Tensor:
        """Return all tokens, in the shape and order of the library."""
        if not self.apart:
            return self.x
        tokens = self._tokens()
        for each, run in zip(self.sequences, self.runs, strict=True):
            tokens = tokens.index_put((each.index,), run.full().to(tokens.dtype))
        return tokens.view(self.x.shape)

    def add(self, gain: Tensor) -> None:
        """Let all tokens have what every token gains, in the shape of the library."""
        self.x = self.x + gain
        flat = gain.expand(self.x.shape).reshape(-1, self.x.shape[-1])
        for each, run in zip(self.sequences, self.runs, strict=True):
            run.add(flat[each.index])

    def _tokens(self) -> Tensor:
        return self.x.reshape(-1, self.x.shape[-1])

    def _attends_further(self, bounds: Tensor | None) -> bool:
        """Return whether a block attends beyond the sequences."""
        if bounds is None or self.bounds is None or torch.equal(bounds, self.bounds):
            return False
        if not torch.isin(bounds, self.bounds).all():
            raise ValueError("a layer attends within windows that another one cuts through, which agglo cannot do")
        return True

    def _with_elsewhere(
        self, block: nn.Module, parts: Parts, inputs: list[AttentionInputs], bounds: Tensor
    ) -> list[AttentionInputs]:
        """Return the inputs with the keys and values of all sequences, and which of these to attend to, as a bias."""
        assert self.bounds is not None
        wider = torch.searchsorted(bounds, self.bounds[:-1], right=True) - 1  # of every sequence
        keys, values, weights, owners = [], [], [], []
        for each, run, own in zip(self.sequences, self.runs, inputs, strict=True):
            table = None if run.positions is None else run.positions.table(own.rotary)
            projected, sizes = parts.project(block, run.x, table), run.sizes()
            batch, _, n_tokens, _ = projected.k.shape
            sizes = torch.ones(batch, n_tokens, device=run.x.device) if sizes is None else sizes
            keys.append(projected.k.transpose(0, 1).flatten(1, 2))
            values.append(projected.v.transpose(0, 1).flatten(1, 2))
            weights.append(sizes.float().log().flatten())
            owners.append(each.members.repeat_interleave(n_tokens))
        k, v = torch.cat(keys, dim=1), torch.cat(values, dim=1)  # (H, all tokens, d)
        weight, owner = torch.cat(weights), torch.cat(owners)
        found = []
        for each, own in zip(self.sequences, inputs, strict=True):
            members, n = each.members.unsqueeze(1), len(each.members)
            seen = (wider[owner] == wider[members]) & (owner != members)
            bias = weight.where(seen, float("-inf"))[:, None, None]
            found.append(replace(own, elsewhere=(k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1), bias)))
        return found
