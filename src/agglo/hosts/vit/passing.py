"""One forward pass over transformer blocks with fewer and fewer tokens: the same for every host and every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agglo.attention import class_attention
from agglo.grouping import Grouping
from agglo.hosts.swap import PassSetup
from agglo.hosts.vit.attending import attend, of_keys, run_front
from agglo.hosts.vit.base import Parts, Projected
from agglo.hosts.vit.padding import Picture, reduce_apart
from agglo.hosts.vit.relative import RelativeBias
from agglo.hosts.vit.restoring import BeforeDrops, Run, ends_first, full_length, in_library_order
from agglo.hosts.vit.rotary import Positions
from agglo.hosts.vit.slices import in_slices
from agglo.methods import Grid, RememberingMethod, View
from agglo.methods.helpers.validation import require_valid
from agglo.tracing import Step

Call = Callable[..., Any]
Inject = Callable[[Tensor], Tensor]


def directly(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and keep its activations."""
    return function(*arguments)


def checkpointed(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and compute its activations again in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False)


class Pass:
    """The state of one forward pass, and the blocks run one after the other. It lives as long as the loop over blocks
    does: two threads may run one model. Arguments are those of `run_blocks`.

    Inside, suffix tokens follow the prefix tokens, and count among them.

    x: tokens (B, G, C) at hand. total: how the first tokens became these. before_drops: see `Run`.
    rotary: their positions; on_grid: those of all tokens.
    policy, processed: the masks of the latest outcome.
    received, class_attention: of the tokens at hand in the latest attention, if the method asks for it.
    memory: (B, T), what the method remembers of every token, at hand or not.
    picture: what must not be merged with padding, if anything.
    """

    def __init__(
        self,
        setup: PassSetup,
        parts: Parts,
        x: Tensor,
        *,
        depth: int,
        prefix: int,
        training: bool,
        suffix: int = 0,
        rotary: Positions | None = None,
        bias: RelativeBias | None = None,
        call: Call = directly,
        grid: Grid | None = None,
        real: Tensor | None = None,
    ) -> None:
        grid = None if grid is None else (int(grid[0]), int(grid[1]))  # tensors, while TorchScript watches
        self.plan, self.method = setup.plan, setup.method
        self.before_block = setup.plan.acts_before_block(setup.method)
        self.picture = None if real is None or not setup.method.mixes else Picture(real)
        self.parts, self.training, self.call, self.grid = parts, training, call, grid
        self.ends = (prefix, suffix)
        self.prefix = prefix + suffix
        self.n_tokens = int(x.shape[1])
        self.x = ends_first(x, self.ends)
        self.rotary = self.on_grid = rotary
        self.bias = self.of_all = bias
        self.targets = self.plan.targets(self.method, self.n_tokens - self.prefix, depth, grid)
        self.asked = [index for index, target in enumerate(self.targets) if target is not None]
        self.total: Grouping | None = None
        self.policy: Tensor | None = None
        self.processed: Tensor | None = None
        self.received: Tensor | None = None
        self.class_attention: Tensor | None = None
        self.memory: Tensor | None = None
        self.before_drops: BeforeDrops = []
        self.steps: list[Step] = []

    def block(self, index: int, block: nn.Module, n_front: int | None = None) -> None:
        """Run one block. n_front: tokens in front that alone are wanted, if it is the last block."""
        method, call, parts = self.method, self.call, self.parts
        target, asked = self.targets[index], self.asked
        if target is not None and method.tokens_return != "never":
            self._let_return()
        if target is not None and self.before_block:
            self._reduce(index, target, None)
            target = None
        table = None if self.rotary is None else self.rotary.table(index)
        bias = None if self.bias is None else self.bias.table(block)
        sizes, x = self.sizes(), self.x
        if n_front is not None and self.policy is None and self.processed is None:
            self.x = call(run_front, parts, block, x, table, bias, sizes, n_front)
            self.total, self.before_drops = None, []
            return
        wanted = index + 1 in asked if self.before_block else target is not None
        receives = method.needs_attention_received and wanted
        gives_class_attention = method.needs_class_attention and wanted
        listens = bool(asked) and asked[0] - 1 <= index < asked[-1]
        remembering = method if isinstance(method, RememberingMethod) and listens else None
        looks = receives or gives_class_attention or remembering is not None
        if target is None and sizes is None and self.policy is None and not looks and self._may_be_whole():
            # The library's block, for tokens in the library's order.
            x = in_library_order(x, self.ends)
            alike = parts.treats_images_alike and (table is None or table.dim() < x.dim())  # not one for each image
            x = in_slices(call, parts.whole, block, x, table) if alike else call(parts.whole, block, x, table)
            self.x = ends_first(x, self.ends)
        else:
            self.x, projected, self.received = call(attend, parts, block, x, table, bias, sizes, self.policy, receives)
            if gives_class_attention:
                self.class_attention = _class_attention(projected, sizes)
            if remembering is not None:
                self._remember(remembering, projected, sizes)
            if target is not None:
                self._reduce(index, target, projected)
            self.x = (
                in_slices(call, parts.feed, block, self.x)
                if parts.treats_images_alike
                else call(parts.feed, block, self.x)
            )
        if self.processed is not None:
            mask = self.processed.to(x.dtype).unsqueeze(-1)
            self.x = mask * self.x + (1 - mask) * x
        if method.tokens_return == "after block":
            self._let_return()

    def _may_be_whole(self) -> bool:
        """Whether the library's own block can take the tokens at hand."""
        if self.parts.never_whole:
            return False
        return self.total is None or not (self.parts.needs_all_tokens or self.bias is not None)

    def patches(self) -> Tensor:
        """Every patch (B, T - prefix, C), see `run_blocks`."""
        return full_length(self.x, self.total, self.before_drops)[:, self.prefix :]

    def full(self) -> Tensor:
        """Every token (B, T, C) in the original number and order."""
        return in_library_order(full_length(self.x, self.total, self.before_drops), self.ends)

    def result(self, kept: list[Tensor]) -> Run:
        """What came out of the blocks run so far."""
        return Run(self.x, self.total, kept, self.before_drops, self.ends)

    def gain(self, inject: Inject) -> None:
        """Let all tokens have what every patch gains."""
        full = full_length(self.x, self.total, self.before_drops)
        gain = inject(full[:, self.prefix :])
        self._add(full, F.pad(gain, (0, 0, self.prefix, 0)) if self.prefix else gain)

    def add(self, gain: Tensor) -> None:
        """Let all tokens have what every token gains, (B or 1, T, C) in the original order."""
        full = full_length(self.x, self.total, self.before_drops)
        self._add(full, ends_first(gain, self.ends).expand_as(full))

    def _add(self, full: Tensor, gain: Tensor) -> None:
        if self.total is None:
            self.x = self.x + gain
            return
        if self.total.drops:
            # The last values of what was dropped, of each position now: members of one group no longer share theirs.
            self.before_drops = [(full + gain, None)]
        # Of all members, also where a method let one of them stand for its group; no group gains where nobody is in it.
        self.x = self.x + replace(self.total, chosen=None).merge(gain)

    def use_bias(self, tables: Callable[[nn.Module], Tensor | None] | None) -> None:
        """Let attention go by these tables from here on; None leaves it as it was."""
        if tables is None:
            return
        if self.bias is None:
            batch = self.x.shape[0]
            every = torch.eye(self.n_tokens, device=self.x.device).expand(batch, -1, -1)
            shares = None if self.total is None else replace(self.total, chosen=None).merge(every)
            self.bias, self.of_all = RelativeBias(tables, shares), RelativeBias(tables)
        else:
            self.bias, self.of_all = replace(self.bias, tables=tables), RelativeBias(tables)

    def prepend(self, tokens: Tensor) -> None:
        """Put further tokens (B, n, C) in front, which are never merged."""
        full, n_more = full_length(self.x, self.total, self.before_drops), int(tokens.shape[1])
        if self.before_drops:
            self.before_drops = [(torch.cat([tokens, full], dim=1), None)]
        self.x = torch.cat([tokens, self.x], dim=1)
        self.ends, self.prefix, self.n_tokens = (
            (self.ends[0] + n_more, self.ends[1]),
            self.prefix + n_more,
            (int(full.shape[1]) + n_more),
        )
        self.total = None if self.total is None else self.total.with_more_in_front(n_more)
        self.received = self.class_attention = None
        self.bias = self.of_all = None
        self.memory = None if self.memory is None else F.pad(self.memory, (n_more, 0))
        if self.policy is not None:
            self.policy = F.pad(self.policy, (n_more, 0), value=1.0)
        if self.processed is not None:
            self.processed = F.pad(self.processed, (n_more, 0), value=1.0)

    def front(self, front_only: bool, traced: bool, last: int) -> int | None:
        """Tokens in front for which alone the last block may run, if the caller of the pass reads no others."""
        return self.plan.front(self.method, self.targets[last], traced) if front_only else None

    def _reduce(self, index: int, target: int, projected: Projected | None) -> None:
        view = self._view(target, projected)
        if self.picture is None:
            outcome = self.method.reduce(view)
            require_valid(self.method, view, outcome)
        else:
            outcome, self.picture = reduce_apart(self.method, view, self.picture, self.total)
        grouping = outcome.grouping
        if grouping.drops:
            self.before_drops = [*self.before_drops, (self.x, self.total)]
        self.x = outcome.new_tokens(self.x)
        self.total = grouping if self.total is None else self.total.then(grouping)
        self.rotary = self.rotary and self.rotary.merged(grouping, outcome.weights)
        self.bias = self.bias and self.bias.merged(grouping, outcome.weights)
        self.policy, self.processed = outcome.policy, outcome.processed
        self.steps.append(Step(index, outcome, self.total))

    def _let_return(self) -> None:
        """Tokens that passed by, or in a group, are back at their places; the masks of the latest outcome are over."""
        if self.total is not None and (self.total.drops or self.total.n_groups < self.n_tokens):
            self.x = full_length(self.x, self.total, self.before_drops)
            self.received = self.class_attention = None  # of fewer tokens
        self.total, self.rotary, self.bias, self.before_drops = None, self.on_grid, self.of_all, []
        self.policy = self.processed = None

    def _remember(self, method: RememberingMethod, projected: Projected, sizes: Tensor | None) -> None:
        with torch.no_grad():
            attention = _class_attention(projected, sizes)
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

    def sizes(self) -> Tensor | None:
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
        total, keys = self.total, None
        if projected is not None:
            keys = projected.k if projected.features is None else projected.features
        return View(
            tokens=self.x,
            keys=keys,
            values=None if projected is None else projected.v[:, :, : self.x.shape[1]],
            class_attention=self.class_attention,
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


def _class_attention(projected: Projected, sizes: Tensor | None) -> Tensor:
    k, n_tokens = projected.k, projected.q.shape[2]
    sizes = of_keys(sizes, k)
    return class_attention(projected.q, k, sizes, scale=projected.scale, bias=projected.bias)[..., :n_tokens]
