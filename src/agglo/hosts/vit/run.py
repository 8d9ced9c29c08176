"""The loop over transformer blocks with fewer and fewer tokens: the same for every host and every method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agglo.attention import class_attention
from agglo.grouping import Grouping
from agglo.hosts.swap import PassSetup
from agglo.hosts.vit.attending import attend, run_front
from agglo.hosts.vit.base import Parts, Projected
from agglo.hosts.vit.padding import Picture, reduce_apart
from agglo.hosts.vit.reading import are_watched
from agglo.hosts.vit.restoring import BeforeDrops, Run, States, full_length
from agglo.hosts.vit.rotary import Rotary
from agglo.hosts.vit.slices import in_slices
from agglo.methods import Grid, RememberingMethod, View
from agglo.methods.helpers.validation import require_valid
from agglo.tracing import Step

Call = Callable[..., Any]
Inject = Callable[[Tensor], Tensor]
Look = Callable[[Tensor], None]
_NOTHING: Mapping[int, Any] = MappingProxyType({})


def directly(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and keep its activations."""
    return function(*arguments)


def checkpointed(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and compute its activations again in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False)


def with_gain(x: Tensor, gain: Tensor, prefix: int) -> Tensor:
    """Tokens x (B, T, C) whose patches gained (B, T - prefix, C)."""
    return x + (F.pad(gain, (0, 0, prefix, 0)) if prefix else gain)


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
    inject: Mapping[int, Inject] = _NOTHING,
    look: Mapping[int, Look] = _NOTHING,
    real: Tensor | None = None,
) -> Run:
    """Run tokens x (B, T, C), prefix tokens first, through the blocks, reducing by the plan and the method that
    the pass began with.

    The loop pauses where others have a say. They see every patch (B, T - prefix, C), in the original number and order:
    that of its group, or its last value if it was dropped or passes by.

    Where the caller of the pass reads tokens in front alone (`reading.py`), the last block runs for these alone, unless
    somebody would notice. They are then all that comes out.

    depth: blocks the schedule counts, where fewer are run.
    rotary: the tables of rotary position embeddings.
    call: `directly`, or `checkpointed` for gradient checkpointing. The decision what to merge is never inside, so that
        it is taken once.
    keep: blocks after which tokens are wanted, full-length unless the plan wants them merged.
    grid: (rows, columns) of the patches, for methods that ask where they are.
    inject: by the block before which it is called: what every patch gains, (B, T - prefix, C). The token of a group
        gains the size-weighted mean over its members; what was dropped gains its own.
    look: by the block after which it is called.
    real: (B, T - prefix) bool, patches of a padded batch that show some of an image, which never merge with those that
        show padding alone (`padding.py`). None where all do, or where it does not matter.
    """
    grid = None if grid is None else (int(grid[0]), int(grid[1]))  # tensors, while TorchScript watches
    run = _Pass(setup, parts, x, prefix, training, rotary, call, grid, real)
    targets = run.plan.targets(run.method, run.n_tokens - prefix, len(blocks) if depth is None else depth, grid)
    asked = [index for index, target in enumerate(targets) if target is not None]
    last = len(blocks) - 1
    n_front = run.plan.front(run.method, targets[last], bool(setup.traces)) if setup.front_only else None
    if n_front is not None and (last in keep or last in look or are_watched(blocks[last].modules())):
        n_front = None
    states = States(run.plan.merged, run.plan.read_blocks)
    for index, block in enumerate(blocks):
        if index in inject:
            run.gain(inject[index])
        run.block(index, block, targets[index], asked, n_front if index == last else None)
        if index in look:
            look[index](run.patches())
        if index in keep:
            states.keep(index, run.x, run.total, run.before_drops)
    for trace in setup.traces:
        trace.record(run.steps)
    return Run(run.x, run.total, states.kept, run.before_drops, run.plan.merged)


class _Pass:
    """The state of one forward pass. It lives as long as `run_blocks` does: two threads may run one model.

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
        prefix: int,
        training: bool,
        rotary: Rotary | None,
        call: Call,
        grid: Grid | None,
        real: Tensor | None,
    ) -> None:
        self.plan, self.method = setup.plan, setup.method
        self.before_block = setup.plan.acts_before_block(setup.method)
        self.picture = None if real is None or not setup.method.mixes else Picture(real)
        self.parts, self.prefix, self.training, self.call, self.grid = parts, prefix, training, call, grid
        self.n_tokens = int(x.shape[1])
        self.x = x
        self.rotary = self.on_grid = rotary
        self.total: Grouping | None = None
        self.policy: Tensor | None = None
        self.processed: Tensor | None = None
        self.received: Tensor | None = None
        self.class_attention: Tensor | None = None
        self.memory: Tensor | None = None
        self.before_drops: BeforeDrops = []
        self.steps: list[Step] = []

    def block(
        self, index: int, block: nn.Module, target: int | None, asked: list[int], n_front: int | None = None
    ) -> None:
        """Run one block. target: what to leave at it, if anything. asked: all blocks where the method is asked.
        n_front: tokens in front that alone are wanted, if it is the last block."""
        method, call, parts = self.method, self.call, self.parts
        if target is not None and method.tokens_return != "never":
            self._let_return()
        if target is not None and self.before_block:
            self._reduce(index, target, None)
            target = None
        table = None if self.rotary is None else self.rotary.table(index)
        sizes, x = self._sizes(), self.x
        if n_front is not None and self.policy is None and self.processed is None:
            self.x = call(run_front, parts, block, x, table, sizes, n_front)
            self.total, self.before_drops = None, []
            return
        wanted = index + 1 in asked if self.before_block else target is not None
        receives = method.needs_attention_received and wanted
        gives_class_attention = method.needs_class_attention and wanted
        listens = bool(asked) and asked[0] - 1 <= index < asked[-1]
        remembering = method if isinstance(method, RememberingMethod) and listens else None
        looks = receives or gives_class_attention or remembering is not None
        if target is None and sizes is None and self.policy is None and not looks:
            one_table = table is None or table.dim() < x.dim()  # not one for each image
            self.x = in_slices(call, parts.whole, block, x, table) if one_table else call(parts.whole, block, x, table)
        else:
            self.x, projected, self.received = call(attend, parts, block, x, table, sizes, self.policy, receives)
            if gives_class_attention:
                self.class_attention = class_attention(projected.q, projected.k, sizes, scale=projected.scale)
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

    def patches(self) -> Tensor:
        """Every patch (B, T - prefix, C), see `run_blocks`."""
        return full_length(self.x, self.total, self.before_drops)[:, self.prefix :]

    def gain(self, inject: Inject) -> None:
        """Let all tokens have what every patch gains."""
        if self.total is None:
            self.x = with_gain(self.x, inject(self.x[:, self.prefix :]), self.prefix)
            return
        full = full_length(self.x, self.total, self.before_drops)
        gain = inject(full[:, self.prefix :])
        gain = F.pad(gain, (0, 0, self.prefix, 0)) if self.prefix else gain
        if self.total.drops:
            # The last values of what was dropped, of each position now: members of one group no longer share theirs.
            self.before_drops = [(full + gain, None)]
        # Of all members, also where a method let one of them stand for its group; no group gains where nobody is in it.
        self.x = self.x + replace(self.total, chosen=None).merge(gain)

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
        self.policy, self.processed = outcome.policy, outcome.processed
        self.steps.append(Step(index, outcome, self.total))

    def _let_return(self) -> None:
        """Tokens that passed by, or in a group, are back at their places; the masks of the latest outcome are over."""
        if self.total is not None and (self.total.drops or self.total.n_groups < self.n_tokens):
            self.x = full_length(self.x, self.total, self.before_drops)
            self.received = self.class_attention = None  # of fewer tokens
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
        total, keys = self.total, None
        if projected is not None:
            keys = projected.k if projected.features is None else projected.features
        return View(
            tokens=self.x,
            keys=keys,
            values=None if projected is None else projected.v,
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
