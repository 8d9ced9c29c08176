"""The loop over transformer blocks with fewer and fewer tokens: the same for every host and every method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agglo.attention import attention_received, class_attention, policy_attention, proportional_attention
from agglo.grouping import Grouping
from agglo.hosts.base import Parts, Projected, ReducedModule
from agglo.hosts.rotary import Rotary
from agglo.hosts.slices import in_slices
from agglo.methods import Grid, Outcome, View
from agglo.methods.base import square
from agglo.tracing import Step

Call = Callable[..., Any]
Earlier = list[tuple[Tensor, Grouping | None]]


def directly(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and keep its activations."""
    return function(*arguments)


def checkpointed(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and compute its activations again in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False)


@dataclass(frozen=True)
class Run:
    """What came out of the loop.

    reduced: tokens (B, G, C) after the last block run: all that a head needs that reads prefix tokens alone.
    grouping: of the first tokens, which led there, if any.
    kept: full-length tokens (B, T, C) after each block that was asked for, in order.
    earlier: the tokens just before some of them were dropped, and the grouping that had led there.
    """

    reduced: Tensor
    grouping: Grouping | None
    kept: list[Tensor]
    earlier: Earlier = field(default_factory=list)

    @property
    def tokens(self) -> Tensor:
        """What a last norm is to act on: one token a group (B, G, C), or, where tokens were dropped, which have last
        values of their own, all positions (B, T, C)."""
        return _full_length(self.reduced, self.grouping, self.earlier) if self.earlier else self.reduced

    def restored(self, tokens: Tensor | None = None) -> Tensor:
        """Tokens in the original number and order, (B, T, C): `self.tokens`, or what a norm made of them."""
        tokens = self.tokens if tokens is None else tokens
        return tokens if self.grouping is None or self.earlier else self.grouping.unmerge(tokens)


def _full_length(x: Tensor, grouping: Grouping | None, earlier: Earlier) -> Tensor:
    """Every position (B, T, C): its group's token in x (B, G, C), or its last value before it was dropped."""
    if grouping is None:
        return x
    last: Tensor | None = None
    for tokens, before in earlier:
        last = tokens if before is None else before.unmerge(tokens, last)
    return grouping.unmerge(x, last)


def run_blocks(
    owner: ReducedModule,
    blocks: Sequence[nn.Module],
    x: Tensor,
    *,
    parts: Parts,
    prefix: int,
    training: bool,
    depth: int | None = None,
    rotary: Rotary | None = None,
    call: Call = directly,
    keep: Collection[int] = (),
    grid: Grid | None = None,
) -> Run:
    """Run tokens x (B, T, C), prefix tokens first, through the blocks, reducing as the owner's plan says.

    depth: blocks the schedule counts, where fewer are run.
    rotary: the tables of rotary position embeddings.
    call: `directly`, or `checkpointed` for gradient checkpointing. The decision what to merge is never inside, so that
        it is taken once.
    keep: blocks after which full-length tokens are wanted.
    grid: (rows, columns) of the patches, for methods that ask where they are; None takes them for a square, if they
        can be one.
    """
    plan, method, trace = owner.agglo_plan, owner.agglo_method, owner.agglo_trace
    n_patches = int(x.shape[1]) - prefix
    grid = square(n_patches) if grid is None else grid
    targets = plan.targets(method, n_patches, len(blocks) if depth is None else depth, grid)
    before_block = method.acts == "before block"
    total: Grouping | None = None
    policy: Tensor | None = None
    received: Tensor | None = None
    earlier: Earlier = []
    steps: list[Step] = []
    kept: list[Tensor] = []

    def view(projected: Projected | None, target: int) -> View:
        attention = None
        if projected is not None and method.needs_class_attention:
            bias = _bias(total, plan.proportional)
            attention = class_attention(projected.q, projected.k, bias, scale=projected.scale)
        keys = None if projected is None else projected.k if projected.features is None else projected.features
        return View(
            tokens=x,
            keys=keys,
            values=None if projected is None else projected.v,
            class_attention=attention,
            sizes=None if total is None else total.sizes,
            counts=None if total is None else total.counts,
            prefix=prefix,
            target=target or None,
            threshold=plan.threshold,
            stage=len(steps),
            training=training,
            attention_received=received,
            policy=policy,
            earlier=tuple(int(step.outcome.grouping.labels.shape[1]) - prefix for step in steps),
            grid=grid,
        )

    def reduced(projected: Projected | None, target: int, index: int) -> tuple[Tensor, Grouping, Rotary | None]:
        outcome = method.reduce(view(projected, target))
        if outcome.grouping.drops:
            earlier.append((x, total))
        tokens, grouping, table = _reduced(x, total, rotary, outcome)
        steps.append(Step(index, outcome, grouping))
        return tokens, grouping, table

    for index, block in enumerate(blocks):
        target = targets[index]
        if target is not None and before_block:
            x, total, rotary = reduced(None, target, index)
            policy, target = steps[-1].outcome.policy, None
        table = None if rotary is None else rotary.table(index)
        sizes = _bias(total, plan.proportional)
        asked_next = index + 1 < len(targets) and targets[index + 1] is not None
        gives_received = method.needs_attention_received and (asked_next if before_block else target is not None)
        if target is None and sizes is None and policy is None and not gives_received:
            one_table = table is None or table.dim() < x.dim()  # not one for each image
            x = in_slices(call, parts.whole, block, x, table) if one_table else call(parts.whole, block, x, table)
        else:
            x, projected = call(_attend, parts, block, x, table, sizes, policy)
            if gives_received:
                received = attention_received(projected.q, projected.k, sizes, scale=projected.scale)
            if target is not None:
                x, total, rotary = reduced(projected, target, index)
                policy = steps[-1].outcome.policy
            x = in_slices(call, parts.feed, block, x)
        if index in keep:
            kept.append(_full_length(x, total, earlier))
    if trace is not None:
        trace.record(steps)
    return Run(x, total, kept, earlier)


def _attend(
    parts: Parts, block: nn.Module, x: Tensor, table: Tensor | None, sizes: Tensor | None, policy: Tensor | None
) -> tuple[Tensor, Projected]:
    projected = parts.project(block, x, table)
    q, k, v, scale = projected.q, projected.k, projected.v, projected.scale
    if policy is None:
        attended = proportional_attention(q, k, v, sizes, scale=scale, dropout=projected.dropout)
    else:
        attended = policy_attention(q, k, v, policy, scale=scale)
    return parts.join(block, x, attended, projected), projected


def _bias(total: Grouping | None, proportional: bool) -> Tensor | None:
    """The sizes attention must know of: all of them, or with proportional attention off only which are 0."""
    if total is None:
        return None
    if proportional:
        return total.sizes
    return (total.sizes > 0).float() if total.counts is not None else None


def _reduced(
    x: Tensor, total: Grouping | None, rotary: Rotary | None, outcome: Outcome
) -> tuple[Tensor, Grouping, Rotary | None]:
    grouping = outcome.grouping
    tokens = grouping.merge(x) if outcome.tokens is None else outcome.tokens
    return tokens, grouping if total is None else total.then(grouping), rotary and rotary.merged(grouping)
