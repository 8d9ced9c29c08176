"""Reducing a padded batch so that no token of an image merges with padding.

The method sees the tokens of each image and those of its padding in two views. A target is split between them in
proportion, so that every image ends with as many tokens as without padding. Where the split asks for a count
that a method cannot leave (ToMe, of two odd sets), the nearest that it can is taken. An image may then end with more
tokens than another, which is filled up with groups of size 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods import Grid, Method, Outcome, View


@dataclass(frozen=True)
class RealPatches:
    """The patches of a padded batch that show some of an image."""

    real: Tensor  # (B, T - prefix) bool; those of each image are a rectangle
    before: tuple[Tensor, ...] = ()  # for every earlier reduction, how many tokens of each image showed some of it


# The axis of the tokens in what a view holds of them.
_TOKEN_AXES = {"tokens": 1, "keys": 2, "values": 2, "class_attention": 2}
_TOKEN_AXES |= dict.fromkeys(("sizes", "attention_received", "policy", "memory"), 1)
# One set of an image's tokens after its reduction: their positions (n,) in the whole view, groups and new tokens.
_Piece = tuple[Tensor, Grouping, Tensor]


def reduce_apart(
    method: Method, view: View, patches: RealPatches, total: Grouping | None
) -> tuple[Outcome, RealPatches]:
    """Return what the method decides about images and padding apart, as one outcome, and the patches after it.

    `total` says how the tokens of the view came to be.
    """
    if method.kind == "merges soft":
        raise ValueError(
            f"{method.name} mixes every token with all others, those of padding too: give images without padding"
        )
    shows, hides = _sets(view, patches.real, total)
    images = [_reduce_image(method, view, patches, image, shows[image], hides[image]) for image in range(len(shows))]
    return _joined(view, images), replace(patches, before=(*patches.before, shows.sum(dim=1)))


def _sets(view: View, real: Tensor, total: Grouping | None) -> tuple[Tensor, Tensor]:
    """Return which patch tokens (B, N) show an image, and which only padding. Groups of size 0 are neither."""
    if total is None:
        return real, ~real
    labels = total.labels[:, view.prefix :]
    shows = torch.zeros(total.sizes.shape, dtype=torch.int64, device=real.device)
    shows = shows.scatter_add(1, labels.clamp(min=0), (real & (labels >= 0)).long())[:, view.prefix :] > 0
    there = total.sizes[:, view.prefix :] > 0
    return shows & there, ~shows & there


def _reduce_image(
    method: Method, view: View, patches: RealPatches, image: int, shows: Tensor, hides: Tensor
) -> list[_Piece]:
    """Reduce the tokens (N,) that show an image, with the prefix tokens, and those of its padding, if there are any."""
    assert view.grid is not None
    real = patches.real[image].unflatten(0, view.grid)
    grid = int(real.any(dim=1).sum()), int(real.any(dim=0).sum())
    before = tuple(int(counts[image]) for counts in patches.before)
    to_real, to_padding = _split(view.target, int(shows.sum()), int(hides.sum()))
    pieces = [_reduced(method, *_part(view, image, shows, view.prefix, to_real, grid, before))]
    if hides.any():
        pieces.append(_reduced(method, *_part(view, image, hides, 0, to_padding, None, ())))
    return pieces


def _split(target: int | None, n_real: int, n_padding: int) -> tuple[int | None, int | None]:
    """Return how many of a target's tokens are the image's, and the padding's: in proportion, at least one each."""
    if target is None:
        return None, None
    n_tokens = n_real + n_padding
    to_real = (2 * target * n_real + n_tokens) // (2 * n_tokens)
    to_real = min(max(to_real, 1, target - n_padding), n_real, target - (n_padding > 0)) or 1
    return to_real, max(target - to_real, min(1, n_padding))


def _part(
    view: View,
    image: int,
    members: Tensor,
    prefix: int,
    target: int | None,
    grid: Grid | None,
    before: tuple[int, ...],
) -> tuple[View, Tensor]:
    """Return a view of only some tokens (N,) bool of an image, and their positions (prefix + n,) in the whole view."""
    index = torch.cat([torch.arange(prefix, device=members.device), members.nonzero().flatten() + view.prefix])

    there = {name: (tensor, axis) for name, axis in _TOKEN_AXES.items() if (tensor := getattr(view, name)) is not None}
    taken = {name: tensor[image : image + 1].index_select(axis, index) for name, (tensor, axis) in there.items()}
    return replace(view, **taken, counts=None, prefix=prefix, target=target, tokens_before=before, grid=grid), index


def _reduced(method: Method, view: View, index: Tensor) -> _Piece:
    n_tokens = int(view.patches.shape[1])
    target = None if view.target is None else _within_reach(method, n_tokens, view.target, view.grid)
    if view.target is not None and (target is None or target >= n_tokens):
        # Padding has no grid: for a method that merges by position its tokens merge one after the other.
        n_groups = n_tokens if target is not None else view.target
        labels = torch.arange(n_tokens, device=index.device)[None] * n_groups // n_tokens
        grouping = Grouping.of(labels, n_groups, view.prefix, view.sizes)
        outcome = Outcome(grouping, None if target is None else view.tokens, mean=getattr(method, "mean", "plain"))
    else:
        outcome = method.decide(replace(view, target=target))
    return index, outcome.grouping, outcome.new_tokens(view.tokens)


def _within_reach(method: Method, n_tokens: int, wanted: int, grid: Grid | None) -> int | None:
    """Return the count nearest to the wanted one that the method leaves; None if it needs a grid and there is none."""
    if wanted >= n_tokens:
        return n_tokens
    by_position = type(method).stages is not Method.stages  # which counts from the whole grid on, at every stage
    start = grid[0] * grid[1] if by_position and grid is not None else n_tokens
    reached, refusal = [], None
    for asked in range(max(1, wanted - 1), min(n_tokens, wanted + 2)):
        try:
            reached.append(min(method.stages(start, [asked], grid)[0], n_tokens))
        except ValueError as error:
            refusal = error
    if reached:
        return min(reached, key=lambda count: (abs(count - wanted), count))
    if grid is None and by_position:
        return None
    assert refusal is not None
    raise refusal


def _joined(view: View, images: list[list[_Piece]]) -> Outcome:
    """Return one outcome: groups of the image first, then those of padding, then groups of size 0 that fill up."""
    batch, n_tokens, _ = view.tokens.shape
    groupings = [grouping for pieces in images for _, grouping, _ in pieces]
    counts = [sum(int((grouping.sizes > 0).sum()) for _, grouping, _ in pieces) for pieces in images]
    n_groups, device = max(counts), view.tokens.device
    # Tokens in no piece only filled up before. They have the weight 0 in whatever group.
    labels = torch.full((batch, n_tokens), n_groups - 1, dtype=torch.int64, device=device)
    sizes = torch.zeros(batch, n_groups, device=device)
    chosen = torch.zeros(batch, n_groups, dtype=torch.int64, device=device)
    tokens = []
    for image, pieces in enumerate(images):
        done, parts = 0, []
        for index, grouping, merged in pieces:
            there, own = grouping.sizes[0] > 0, grouping.labels[0]
            numbers = there.cumsum(0) - 1 + done
            here = slice(done, done + int(there.sum()))
            labels[image, index] = numbers[own.clamp(min=0)].where(own >= 0, -1)
            sizes[image, here] = grouping.sizes[0, there]
            if grouping.chosen is not None:
                chosen[image, here] = index[grouping.chosen[0, there]]
            parts.append(merged[0, there])
            done = here.stop
        tokens.append(F.pad(torch.cat(parts), (0, 0, 0, n_groups - done)))
    joined = Grouping(
        labels,
        sizes,
        view.prefix,
        view.sizes,
        counts=torch.tensor(counts, device=device) - view.prefix if min(counts) < n_groups else None,
        drops=any(grouping.drops for grouping in groupings),
        chosen=chosen if all(grouping.chosen is not None for grouping in groupings) else None,
    )
    return Outcome(joined, torch.stack(tokens))
