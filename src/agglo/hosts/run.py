"""The loop over transformer blocks with fewer and fewer tokens: the same for every host and every method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agglo.attention import class_attention, proportional_attention
from agglo.grouping import Grouping
from agglo.hosts.base import Parts, Projected, ReducedModule
from agglo.hosts.rotary import Rotary
from agglo.methods import Outcome, View
from agglo.tracing import Step

Call = Callable[..., Any]


def directly(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and keep its activations."""
    return function(*arguments)


def checkpointed(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and compute its activations again in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False)


@dataclass(frozen=True)
class Run:
    """tokens (B, G, C) after the last block run, and the grouping of the first tokens that led there, if any.

    kept: full-length tokens (B, T, C) after each block that was asked for, in order.
    """

    tokens: Tensor
    grouping: Grouping | None
    kept: list[Tensor]

    def restored(self, tokens: Tensor | None = None) -> Tensor:
        """Tokens (by default the last ones) in the original number and order: (B, T, C)."""
        tokens = self.tokens if tokens is None else tokens
        return tokens if self.grouping is None else self.grouping.unmerge(tokens)


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
) -> Run:
    """Run tokens x (B, T, C), prefix tokens first, through the blocks, reducing as the owner's plan says.

    depth: blocks the schedule counts, where fewer are run.
    rotary: the tables of rotary position embeddings.
    call: `directly`, or `checkpointed` for gradient checkpointing. The decision what to merge is never inside, so that
        it is taken once.
    keep: blocks after which full-length tokens are wanted.
    """
    plan, method, trace = owner.agglo_plan, owner.agglo_method, owner.agglo_trace
    targets = plan.targets(method, int(x.shape[1]) - prefix, len(blocks) if depth is None else depth)
    total: Grouping | None = None
    steps: list[Step] = []
    kept: list[Tensor] = []

    def view(projected: Projected | None, target: int) -> View:
        sizes = None if total is None else total.sizes
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
            sizes=sizes,
            counts=None if total is None else total.counts,
            prefix=prefix,
            target=target or None,
            threshold=plan.threshold,
            stage=len(steps),
            training=training,
        )

    for index, block in enumerate(blocks):
        target = targets[index]
        if target is not None and method.acts == "before block":
            outcome = method.reduce(view(None, target))
            x, total, rotary = _reduced(x, total, rotary, outcome)
            steps.append(Step(index, outcome, total))
            target = None
        table = None if rotary is None else rotary.table(index)
        sizes = _bias(total, plan.proportional)
        if target is None and sizes is None:
            x = call(parts.whole, block, x, table)
        else:
            x, projected = call(_attend, parts, block, x, table, sizes)
            if target is not None:
                outcome = method.reduce(view(projected, target))
                x, total, rotary = _reduced(x, total, rotary, outcome)
                steps.append(Step(index, outcome, total))
            x = call(parts.feed, block, x)
        if index in keep:
            kept.append(x if total is None else total.unmerge(x))
    if trace is not None:
        trace.record(steps)
    return Run(x, total, kept)


def _attend(
    parts: Parts, block: nn.Module, x: Tensor, table: Tensor | None, sizes: Tensor | None
) -> tuple[Tensor, Projected]:
    projected = parts.project(block, x, table)
    attended = proportional_attention(
        projected.q, projected.k, projected.v, sizes, scale=projected.scale, dropout=projected.dropout
    )
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
