"""The loop over transformer blocks with fewer and fewer tokens: the same for every host and every method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agglo.attention import attention_received, class_attention, policy_attention, proportional_attention
from agglo.grouping import Grouping
from agglo.hosts.swap import PassSetup
from agglo.hosts.vit.base import Parts, Projected
from agglo.hosts.vit.rotary import Rotary
from agglo.hosts.vit.slices import in_slices
from agglo.methods import Grid, RememberingMethod, View
from agglo.methods.helpers.validation import require_valid
from agglo.tracing import Step

Call = Callable[..., Any]
BeforeDrops = list[tuple[Tensor, Grouping | None]]


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
    before_drops: the tokens just before some of them were dropped, and the grouping that had led there.
    """

    reduced: Tensor
    grouping: Grouping | None
    kept: list[Tensor]
    before_drops: BeforeDrops = field(default_factory=list)

    @property
    def tokens(self) -> Tensor:
        """What a last norm is to act on: one token per group (B, G, C), or, where tokens were dropped, which have last
        values of their own, all positions (B, T, C)."""
        return _full_length(self.reduced, self.grouping, self.before_drops) if self.before_drops else self.reduced

    def restored(self, tokens: Tensor | None = None) -> Tensor:
        """Tokens in the original number and order, (B, T, C): `self.tokens`, or what a norm made of them."""
        tokens = self.tokens if tokens is None else tokens
        return tokens if self.grouping is None or self.before_drops else self.grouping.unmerge(tokens)


def _full_length(x: Tensor, grouping: Grouping | None, before_drops: BeforeDrops) -> Tensor:
    """Every position (B, T, C): its group's token in x (B, G, C), or its last value before it was dropped."""
    if grouping is None:
        return x
    last: Tensor | None = None
    for tokens, before in before_drops:
        last = tokens if before is None else before.unmerge(tokens, last)
    return grouping.unmerge(x, last)


def run_blocks(
    setup: PassSetup,
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
    """Run tokens x (B, T, C), prefix tokens first, through the blocks, reducing by the plan and the method that
    the pass began with.

    depth: blocks the schedule counts, where fewer are run.
    rotary: the tables of rotary position embeddings.
    call: `directly`, or `checkpointed` for gradient checkpointing. The decision what to merge is never inside, so that
        it is taken once.
    keep: blocks after which full-length tokens are wanted.
    grid: (rows, columns) of the patches, for methods that ask where they are.
    """
    grid = None if grid is None else (int(grid[0]), int(grid[1]))  # tensors, while TorchScript watches
    run = _Pass(setup, parts, x, prefix, training, rotary, call, grid)
    targets = run.plan.targets(run.method, run.n_tokens - prefix, len(blocks) if depth is None else depth, grid)
    asked = [index for index, target in enumerate(targets) if target is not None]
    kept: list[Tensor] = []
    for index, block in enumerate(blocks):
        run.block(index, block, targets[index], asked)
        if index in keep:
            kept.append(_full_length(run.x, run.total, run.before_drops))
    for trace in setup.traces:
        trace.record(run.steps)
    return Run(run.x, run.total, kept, run.before_drops)


class _Pass:
    """The state of one forward pass. It lives as long as `run_blocks` does: two threads may run one model.

    x: tokens (B, G, C) at hand. total: how the first tokens became these. before_drops: see `Run`.
    rotary: their positions; on_grid: those of all tokens.
    policy, processed: the masks of the latest outcome.
    received: the attention each token at hand got in the latest block, if the method asks for it.
    memory: (B, T), what the method remembers of every token, at hand or not.
    """

    def __init__(
        self,
        setup: PassSetup,
        parts: Parts,
        x: Tensor,
        prefix: int,
        training: bool,
        rotary: Rotary | None,
        call: Call,
        grid: Grid | None,
    ) -> None:
        self.plan, self.method = setup.plan, setup.method
        self.parts, self.prefix, self.training, self.call, self.grid = parts, prefix, training, call, grid
        self.n_tokens = int(x.shape[1])
        self.x = x
        self.rotary = self.on_grid = rotary
        self.total: Grouping | None = None
        self.policy: Tensor | None = None
        self.processed: Tensor | None = None
        self.received: Tensor | None = None
        self.memory: Tensor | None = None
        self.before_drops: BeforeDrops = []
        self.steps: list[Step] = []

    def block(self, index: int, block: nn.Module, target: int | None, asked: list[int]) -> None:
        """Run one block. target: what to leave at it, if anything. asked: all blocks where the method is asked."""
        method, call, parts = self.method, self.call, self.parts
        before_block = method.acts == "before block"
        if target is not None and method.tokens_return != "never":
            self._let_return()
        if target is not None and before_block:
            self._reduce(index, target, None)
            target = None
        wanted = index + 1 in asked if before_block else target is not None
        gives_received = method.needs_attention_received and wanted
        listens = bool(asked) and asked[0] - 1 <= index < asked[-1]
        remembering = method if isinstance(method, RememberingMethod) and listens else None
        table = None if self.rotary is None else self.rotary.table(index)
        sizes, x = self._sizes(), self.x
        if target is None and sizes is None and self.policy is None and not gives_received and remembering is None:
            one_table = table is None or table.dim() < x.dim()  # not one for each image
            self.x = in_slices(call, parts.whole, block, x, table) if one_table else call(parts.whole, block, x, table)
        else:
            self.x, projected = call(_attend, parts, block, x, table, sizes, self.policy)
            if gives_received:
                self.received = attention_received(projected.q, projected.k, sizes, scale=projected.scale)
            if remembering is not None:
                self._remember(remembering, projected, sizes)
            if target is not None:
                self._reduce(index, target, projected)
            self.x = in_slices(call, parts.feed, block, self.x)
        if self.processed is not None:
            mask = self.processed.to(x.dtype).unsqueeze(-1)
            self.x = mask * self.x + (1 - mask) * x
        if method.tokens_return == "after block":
            self._let_return()

    def _reduce(self, index: int, target: int, projected: Projected | None) -> None:
        view = self._view(target, projected)
        outcome = self.method.reduce(view)
        require_valid(self.method, view, outcome)
        grouping = outcome.grouping
        if grouping.drops:
            self.before_drops = [*self.before_drops, (self.x, self.total)]
        self.x = grouping.merge(self.x) if outcome.tokens is None else outcome.tokens
        self.total = grouping if self.total is None else self.total.then(grouping)
        self.rotary = self.rotary and self.rotary.merged(grouping, outcome.weights)
        self.policy, self.processed = outcome.policy, outcome.processed
        self.steps.append(Step(index, outcome, self.total))

    def _let_return(self) -> None:
        """Tokens that passed by, or in a group, are back at their places; the masks of the latest outcome are over."""
        if self.total is not None and (self.total.drops or self.total.n_groups < self.n_tokens):
            self.x = _full_length(self.x, self.total, self.before_drops)
        self.total, self.rotary, self.before_drops = None, self.on_grid, []
        self.policy = self.processed = None

    def _remember(self, method: RememberingMethod, projected: Projected, sizes: Tensor | None) -> None:
        with torch.no_grad():
            attention = class_attention(projected.q, projected.k, sizes, scale=projected.scale)
            latest = method.remember(attention, self._memory())
            if self.total is not None:
                before = None if self.memory is None else self.memory.unsqueeze(-1)
                latest = self.total.unmerge(latest.unsqueeze(-1), before).squeeze(-1)
            self.memory = latest

    def _memory(self) -> Tensor | None:
        """What is remembered of the tokens at hand, (B, G)."""
        if self.memory is None or self.total is None:
            return self.memory
        return self.total.merge(self.memory.unsqueeze(-1)).squeeze(-1)

    def _sizes(self) -> Tensor | None:
        """The sizes (B, G) that attention must know of: all of them, or where they do not matter which are 0: padding,
        and tokens that pass by."""
        some_are_hidden = True
        if self.processed is not None and self.policy is None:
            seen = self.processed.detach().float()
        elif self.total is None:
            return None
        else:
            some_are_hidden = self.total.counts is not None
            if not self.plan.proportional and not some_are_hidden:
                return None
            seen = self.total.sizes if self.plan.proportional else (self.total.sizes > 0).float()
        if self.prefix == 0 and some_are_hidden:
            # An image may have nothing to attend to. What it makes of that is not used, but NaN would spread.
            return seen.where((seen > 0).any(dim=1, keepdim=True), 1.0)
        return seen

    def _view(self, target: int, projected: Projected | None) -> View:
        method, total = self.method, self.total
        attention = keys = None
        if projected is not None:
            keys = projected.k if projected.features is None else projected.features
            if method.needs_class_attention:
                attention = class_attention(projected.q, projected.k, self._sizes(), scale=projected.scale)
        return View(
            tokens=self.x,
            keys=keys,
            values=None if projected is None else projected.v,
            class_attention=attention,
            sizes=None if total is None else total.sizes,
            counts=None if total is None else total.counts,
            prefix=self.prefix,
            target=target or None,
            threshold=self.plan.threshold,
            stage=len(self.steps),
            training=self.training,
            attention_received=self.received,
            policy=self.policy,
            tokens_before=tuple(int(step.outcome.grouping.labels.shape[1]) - self.prefix for step in self.steps),
            grid=self.grid,
            memory=self._memory(),
        )


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
