"""Reducing a padded batch so that no token of an image merges with padding.

Tokens that show an image and tokens that show only padding are shown to the method apart, as two sets of their own. A
target is split between them in proportion, so that every image ends with as many tokens as without padding. Images
whose sets are of equal sizes are shown together.

Where the split asks for a count that a method cannot leave (ToMe, of two odd sets), the nearest that it can is taken.
An image may then end with more tokens than another, which is filled up with groups of size 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods import Grid, Method, Outcome, View


@dataclass(frozen=True)
class RealPatches:
    """The patches of a padded batch that show some of an image.

    Args:
        real: (B, T - prefix) bool; those of each image are a rectangle.
        before: For every reduction that came before, how many of the tokens of each image were real, (B,).
    """

    real: Tensor
    before: tuple[Tensor, ...] = ()


def reduce_apart(
    method: Method, view: View, patches: RealPatches, total: Grouping | None
) -> tuple[Outcome, RealPatches]:
    """What the method decides about images and padding apart, as one outcome. total: how the view's tokens came."""
    if method.kind == "merges soft":
        raise ValueError(
            f"{method.name} mixes every token with all others, those of padding too: give the ViTAdapter "
            "padding='merge', or images of one size"
        )
    real, padding = _sets(view, patches.real, total)
    n_real, n_padding = real.sum(dim=1), padding.sum(dim=1)
    rows, columns = _rectangle(patches.real, view.grid)
    alike: dict[tuple[int, ...], list[int]] = {}
    before = torch.stack(patches.before, dim=1).tolist() if patches.before else [()] * len(real)
    sides = zip(n_real.tolist(), n_padding.tolist(), rows.tolist(), columns.tolist(), before, strict=True)
    for image, (r, p, height, width, earlier) in enumerate(sides):
        alike.setdefault((r, p, height, width, *earlier), []).append(image)
    pieces: list[tuple[list[int], list[_Piece]]] = []
    for (r, p, height, width, *earlier), images in alike.items():
        to_real, to_padding = _split(view.target, r, p)
        shown = _part(view, images, real, r, view.prefix, to_real, (height, width), tuple(earlier))
        hidden = _part(view, images, padding, p, 0, to_padding, None, ())
        pieces.append((images, [_reduced(method, *shown), *([_reduced(method, *hidden)] if p else [])]))
    outcome = _joined(view, pieces)
    return outcome, replace(patches, before=(*patches.before, n_real))


def _sets(view: View, real: Tensor, total: Grouping | None) -> tuple[Tensor, Tensor]:
    """Which of the view's patch tokens (B, N) show an image, and which only padding. Groups of size 0 are neither."""
    if total is None:
        return real, ~real
    labels = total.labels[:, view.prefix :]
    shows = torch.zeros(total.sizes.shape, dtype=torch.int64, device=real.device)
    shows = shows.scatter_add(1, labels.clamp(min=0), (real & (labels >= 0)).long())[:, view.prefix :] > 0
    there = total.sizes[:, view.prefix :] > 0
    return shows & there, ~shows & there


def _rectangle(real: Tensor, grid: Grid | None) -> tuple[Tensor, Tensor]:
    """Rows and columns of each image within its padding, (B,) each."""
    assert grid is not None
    there = real.unflatten(1, grid)
    return there.any(dim=2).sum(dim=1), there.any(dim=1).sum(dim=1)


def _split(target: int | None, n_real: int, n_padding: int) -> tuple[int | None, int | None]:
    """How many of a target's tokens are the image's, and how many the padding's: in proportion, at least one each."""
    if target is None:
        return None, None
    n_tokens = n_real + n_padding
    to_real = (2 * target * n_real + n_tokens) // (2 * n_tokens)
    to_real = min(max(to_real, 1, target - n_padding), n_real, target - (n_padding > 0)) or 1
    return to_real, max(target - to_real, min(1, n_padding))


@dataclass(frozen=True)
class _Piece:
    """One set after its reduction. index: (b, n), its tokens' places in the whole view."""

    index: Tensor
    outcome: Outcome
    tokens: Tensor


def _part(
    view: View,
    images: list[int],
    members: Tensor,
    n_members: int,
    prefix: int,
    target: int | None,
    grid: Grid | None,
    before: tuple[int, ...],
) -> tuple[View, Tensor]:
    """The view of some images' members (B, N) bool alone, n_members in each, and their places (b, prefix + n)."""
    device = members.device
    chosen = torch.tensor(images, device=device)
    order = (~members[chosen]).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_members] + view.prefix
    index = torch.cat([torch.arange(prefix, device=device).expand(len(images), -1), order], dim=1)

    def take(tensor: Tensor | None, axis: int) -> Tensor | None:
        if tensor is None:
            return None
        shape = [len(images)] + [1] * (tensor.dim() - 1)
        shape[axis] = -1
        wanted = list(tensor.shape)
        wanted[0], wanted[axis] = len(images), index.shape[1]
        return tensor[chosen].gather(axis, index.view(shape).expand(wanted))

    tokens = take(view.tokens, 1)
    assert tokens is not None
    part = replace(
        view,
        tokens=tokens,
        keys=take(view.keys, 2),
        values=take(view.values, 2),
        class_attention=take(view.class_attention, 2),
        sizes=take(view.sizes, 1),
        counts=None,
        prefix=prefix,
        target=target,
        attention_received=take(view.attention_received, 1),
        policy=take(view.policy, 1),
        tokens_before=before,
        grid=grid,
        memory=take(view.memory, 1),
    )
    return part, index


def _reduced(method: Method, view: View, index: Tensor) -> _Piece:
    n_tokens = int(view.patches.shape[1])
    if view.target is not None:
        target = _within_reach(method, n_tokens, view.target, view.grid)
        if target is None:
            return _in_order(method, view, index)
        if target >= n_tokens:
            labels = torch.arange(n_tokens, device=index.device).expand(len(index), -1)
            return _Piece(index, Outcome(Grouping.of(labels, n_tokens, view.prefix, view.sizes)), view.tokens)
        view = replace(view, target=target)
    outcome = method.decide(view)
    return _Piece(index, outcome, outcome.new_tokens(view.tokens))


def _within_reach(method: Method, n_tokens: int, wanted: int, grid: Grid | None) -> int | None:
    """The count nearest to the wanted one that the method leaves; None if it needs a grid and there is none."""
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


def _in_order(method: Method, view: View, index: Tensor) -> _Piece:
    """Padding, for a method that merges by position: its tokens have no grid, and so merge one after the other."""
    assert view.target is not None
    n_tokens = int(view.patches.shape[1])
    labels = torch.arange(n_tokens, device=index.device) * view.target // n_tokens
    grouping = Grouping.of(labels.expand(len(index), -1), view.target, view.prefix, view.sizes)
    outcome = Outcome(grouping, mean=getattr(method, "mean", "plain"))
    return _Piece(index, outcome, outcome.new_tokens(view.tokens))


def _joined(view: View, pieces: list[tuple[list[int], list[_Piece]]]) -> Outcome:
    """One outcome of all images: groups of the image first, then those of padding, then any that only fill up."""
    batch, n_tokens, width = view.tokens.shape
    prefix, device = view.prefix, view.tokens.device
    n_groups = max(sum(piece.outcome.grouping.n_groups for piece in parts) for _, parts in pieces)
    # Tokens in no piece only fill up themselves. They have the weight 0 in whatever group.
    labels = torch.full((batch, n_tokens), n_groups - 1, dtype=torch.int64, device=device)
    sizes = torch.zeros(batch, n_groups, device=device)
    chosen = torch.zeros(batch, n_groups, dtype=torch.int64, device=device)
    rows: list[Tensor] = [view.tokens] * batch
    for images, parts in pieces:
        here = torch.tensor(images, device=device)
        done, own = 0, []
        for piece in parts:
            grouping = piece.outcome.grouping
            after = done + grouping.n_groups
            labels[here.unsqueeze(1), piece.index] = torch.where(grouping.labels < 0, -1, grouping.labels + done)
            sizes[here, done:after] = grouping.sizes
            if grouping.chosen is not None:
                chosen[here, done:after] = piece.index.gather(1, grouping.chosen)
            own.append(piece.tokens)
            done = after
        tokens = torch.cat([*own, view.tokens.new_zeros(len(images), n_groups - done, width)], dim=1)
        for place, image in enumerate(images):
            rows[image] = tokens[place]
    groupings = [piece.outcome.grouping for _, parts in pieces for piece in parts]
    selects = all(grouping.chosen is not None for grouping in groupings)
    joined = Grouping(
        labels,
        sizes,
        prefix,
        view.sizes,
        drops=any(grouping.drops for grouping in groupings),
        chosen=chosen if selects else None,
    )
    return _filled_last(joined, torch.stack(rows))


def _filled_last(grouping: Grouping, tokens: Tensor) -> Outcome:
    """Groups of size 0 behind all others, and the counts of the others, if there are any."""
    fills = grouping.sizes == 0
    if not fills.any():
        return Outcome(grouping, tokens)
    order = fills.to(torch.uint8).argsort(dim=1, stable=True)
    labels = order.argsort(dim=1).gather(1, grouping.labels.clamp(min=0)).where(grouping.labels >= 0, -1)
    counts = (~fills).sum(dim=1) - grouping.prefix
    widest = int(counts.max()) + grouping.prefix
    order = order[:, :widest]
    moved = replace(
        grouping,
        labels=labels.clamp(max=widest - 1),
        sizes=grouping.sizes.gather(1, order),
        counts=counts if bool((counts < widest - grouping.prefix).any()) else None,
        chosen=None if grouping.chosen is None else grouping.chosen.gather(1, order),
    )
    return Outcome(moved, tokens.gather(1, order.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])))
