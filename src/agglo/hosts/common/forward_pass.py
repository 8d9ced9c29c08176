"""One forward pass over transformer blocks with fewer and fewer tokens: the same for every host and every method."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.attention import LogSizes, class_attention
from agglo.grouping import Grouping
from agglo.hosts.common.blocks import AttentionInputs, Call, Parts, Projected, attend, directly, in_slices, of_keys
from agglo.hosts.common.padding import RealPatches, reduce_apart
from agglo.hosts.common.positions import Positions, RelativeBias
from agglo.hosts.common.swap import PassSetup, are_watched
from agglo.methods import Grid, View
from agglo.tracing import Step

NO_INPUTS = AttentionInputs()


class ForwardPass:
    """The state of one forward pass, whose blocks are run one after the other.

    Args:
        setup: The settings of this pass.
        x: Tokens (B, T, C), prefix tokens first and suffix tokens last; neither are ever merged.
        depth: Blocks that the schedule counts.
        prefix: Number of prefix tokens.
        training: Whether the model trains.
        suffix: Number of suffix tokens.
        positions: Those of a model with rotary position embeddings.
        grid: (rows, columns) of the patches, for methods that ask where they are.
        real: (B, T - prefix) bool, patches of a padded batch that show some of an image, which never merge with those
            that show only padding. None where all do, or where it does not matter.
        call: `directly`, or `checkpointed` for gradient checkpointing, which never repeats the method's decision.
    """

    never_whole = False  # whether the library's own blocks cannot take the tokens as they are

    def __init__(
        self,
        setup: PassSetup,
        x: Tensor,
        *,
        depth: int,
        prefix: int,
        training: bool,
        suffix: int = 0,
        positions: Positions | None = None,
        grid: Grid | None = None,
        real: Tensor | None = None,
        call: Call = directly,
    ) -> None:
        grid = grid and (int(grid[0]), int(grid[1]))  # tensors, while TorchScript watches
        self.setup, self.plan, self.method = setup, setup.plan, setup.method
        self.front_only, self.training, self.call, self.grid = setup.front_only, training, call, grid
        self.real = None if real is None or not setup.method.mixes else RealPatches(real)
        self.ends = (prefix, suffix)
        self.prefix = prefix + suffix
        self.n_tokens = int(x.shape[1])
        self.x = ends_first(x, self.ends)
        self.positions = self.initial_positions = positions
        self.targets = setup.targets(self.n_tokens - self.prefix, depth, grid)
        self.reducing = [index for index, target in enumerate(self.targets) if target is not None]
        self.before_block = self.plan.place == "before_block"
        # Blocks whose attention the method decides by, and those whose attention it remembers.
        self.attention_blocks = [index - int(self.before_block) for index in self.reducing]
        remembers = self.method.remembers and bool(self.reducing)
        # A list: torch.compile may trace with an index that is no constant, which cannot be looked for in a range.
        self.remembered_blocks = [*range(self.reducing[0] - 1, self.reducing[-1])] if remembers else []
        self.total: Grouping | None = None  # how the first tokens became those that are left
        self.bias: RelativeBias | None = None  # once a block has one
        self.logged: tuple[Tensor, LogSizes] | None = None  # the latest sizes, and their logarithms
        self.policy: Tensor | None = None  # of the latest outcome, as is processed
        self.processed: Tensor | None = None
        self.received: Tensor | None = None  # of the latest attention, as is class_attention
        self.class_attention: Tensor | None = None
        self.memory: Tensor | None = None  # (B, T), what the method remembers of every token, left or not
        # The tokens just before some of them were dropped, and the grouping that had led there.
        self.before_drops: list[tuple[Tensor, Grouping | None]] = []
        self.steps: list[Step] = []

    def block(self, index: int, block: nn.Module, parts: Parts, given: AttentionInputs = NO_INPUTS) -> None:
        """Run one block, given the rotary table and the bias of all tokens, and reduce the tokens if it is its turn."""
        target = self.targets[index]
        if given.bias is not None and self.bias is None:
            self.bias = RelativeBias()
            if self.total is not None:
                self.bias = self.bias.after(replace(self.total, chosen=None))
        if target is not None and self.method.tokens_return != "never":
            self._let_return()
        if target is not None and self.before_block:
            self._reduce(index, target, None)
            target = None
        inputs, before = self._inputs(given), self.x
        n_front = self._n_front(index, block)
        if n_front is not None:
            joined, _, _ = self.call(attend, parts, block, self.x, inputs, False, n_front)
            self.x = self.call(parts.feed, block, joined)
            self.total, self.before_drops = None, []
            return
        asks = self.method.needs_attention_received or self.method.needs_class_attention
        looks = (asks and index in self.attention_blocks) or index in self.remembered_blocks
        if target is None and not looks and self._may_run_whole(parts, inputs):
            self._run_whole(block, parts, inputs.rotary)
        else:
            self._run_in_parts(index, block, parts, inputs, target)
        if self.processed is not None:
            mask = self.processed.to(before.dtype).unsqueeze(-1)
            self.x = mask * self.x + (1 - mask) * before
        if self.method.tokens_return == "after_block":
            self._let_return()

    def _inputs(self, given: AttentionInputs) -> AttentionInputs:
        """Return what the attention of the tokens that are left depends on."""
        sizes = self.sizes()
        if sizes is not None and (self.logged is None or self.logged[0] is not sizes):
            self.logged = sizes, LogSizes(sizes)
        return AttentionInputs(
            rotary=given.rotary if self.positions is None else self.positions.table(given.rotary),
            bias=None if given.bias is None or self.bias is None else self.bias.between(given.bias),
            sizes=sizes,
            log_sizes=None if sizes is None or self.logged is None else self.logged[1],
            policy=self.policy,
            elsewhere=given.elsewhere,
        )

    def _n_front(self, index: int, block: nn.Module) -> int | None:
        """Return for how many tokens in front the block runs, if it need not run for all."""
        last = len(self.targets) - 1
        masked = self.policy is not None or self.processed is not None
        if not self.front_only or index != last or masked or are_watched(block.modules()):
            return None
        return self.plan.front(self.method, self.targets[last], bool(self.setup.traces))

    def _may_run_whole(self, parts: Parts, inputs: AttentionInputs) -> bool:
        """Return whether the library's own block can take the tokens that are left."""
        if self.never_whole or inputs.sizes is not None or self.policy is not None:
            return False
        return self.total is None or not (parts.needs_all_tokens or inputs.bias is not None)

    def _run_whole(self, block: nn.Module, parts: Parts, rotary: Tensor | None) -> None:
        x = in_library_order(self.x, self.ends)
        alike = parts.treats_images_alike and (rotary is None or rotary.dim() < x.dim())  # not one for each image
        self.x = ends_first(in_slices(self.call, alike, parts.whole, block, x, rotary), self.ends)

    def _run_in_parts(
        self, index: int, block: nn.Module, parts: Parts, inputs: AttentionInputs, target: int | None
    ) -> None:
        wanted = index in self.attention_blocks
        receives = wanted and self.method.needs_attention_received
        self.x, projected, self.received = self.call(attend, parts, block, self.x, inputs, receives)
        if wanted and self.method.needs_class_attention:
            self.class_attention = _class_attention(projected, inputs)
        if index in self.remembered_blocks:
            self._remember(projected, inputs)
        if target is not None:
            self._reduce(index, target, projected)
        self.x = in_slices(self.call, parts.treats_images_alike, parts.feed, block, self.x)

    def _full_length(self) -> Tensor:
        """Return every position (B, T, C): its group's token, or its last value before it was dropped."""
        if self.total is None:
            return self.x
        last: Tensor | None = None
        for tokens, before in self.before_drops:
            last = tokens if before is None else before.unmerge(tokens, last)
        return self.total.unmerge(self.x, last)

    def patches(self) -> Tensor:
        """Return every patch (B, T - prefix, C), in the original number and order."""
        return self._full_length()[:, self.prefix :]

    def full(self) -> Tensor:
        """Return every token (B, T, C) in the original number and order."""
        return in_library_order(self._full_length(), self.ends)

    def reduced(self) -> Tensor:
        """Return the tokens that are left, (B, G, C)."""
        return in_library_order(self.x, self.ends)

    def merged_like_now(self, earlier: Tensor) -> Tensor:
        """Return earlier tokens (B, T, C) of `full` in the groups of the tokens that are left."""
        earlier = ends_first(earlier, self.ends)
        return in_library_order(earlier if self.total is None else self.total.merge(earlier), self.ends)

    def record(self) -> None:
        """Add the reductions of this pass to the traces that are open."""
        for trace in self.setup.traces:
            trace.record(self.steps)

    def add(self, gain: Tensor) -> None:
        """Add (B or 1, T, C) to all tokens in their original order.

        The token of a group gains the size-weighted mean over its members; what was dropped gains its own.
        """
        gain = ends_first(gain, self.ends)
        if self.total is None:
            self.x = self.x + gain
            return
        full = self._full_length()
        gain = gain.expand_as(full)
        if self.total.drops:
            # Members of a group that was dropped no longer share one value.
            self.before_drops = [(full + gain, None)]
        # Of all members, also where a method let one of them stand for its group.
        self.x = self.x + replace(self.total, chosen=None).merge(gain)

    def prepend(self, tokens: Tensor) -> None:
        """Put further tokens (B, n, C) in front, which are never merged."""
        full, n_more = self._full_length(), int(tokens.shape[1])
        if self.before_drops:
            self.before_drops = [(torch.cat([tokens, full], dim=1), None)]
        self.x = torch.cat([tokens, self.x], dim=1)
        self.ends = (self.ends[0] + n_more, self.ends[1])
        self.prefix, self.n_tokens = self.prefix + n_more, int(full.shape[1]) + n_more
        self.total = self.total and self.total.with_more_prefix_tokens(n_more)
        self.received = self.class_attention = self.bias = None
        self.memory = None if self.memory is None else F.pad(self.memory, (n_more, 0))
        self.policy = None if self.policy is None else F.pad(self.policy, (n_more, 0), value=1.0)
        self.processed = None if self.processed is None else F.pad(self.processed, (n_more, 0), value=1.0)

    def _reduce(self, index: int, target: int, projected: Projected | None) -> None:
        view = self._view(index, target, projected)
        if self.real is None:
            outcome = self.method.decide(view)
        else:
            outcome, self.real = reduce_apart(self.method, view, self.real, self.total)
        grouping = outcome.grouping
        if grouping.drops:
            self.before_drops = [*self.before_drops, (self.x, self.total)]
        self.x = outcome.new_tokens(self.x)
        self.total = grouping if self.total is None else self.total.then(grouping)
        self.positions = self.positions and self.positions.after(grouping, outcome.weights)
        self.bias = self.bias and self.bias.after(grouping, outcome.weights)
        self.policy, self.processed = outcome.policy, outcome.processed
        self.steps.append(Step(index, outcome, self.total))

    def _let_return(self) -> None:
        """Put tokens that passed by, or are in a group, back at their positions, and drop the latest masks."""
        if self.total is not None and (self.total.drops or self.total.n_groups < self.n_tokens):
            self.x = self._full_length()
            self.received = self.class_attention = None  # of fewer tokens
        self.total, self.positions, self.before_drops = None, self.initial_positions, []
        self.bias = self.bias and RelativeBias()
        self.policy = self.processed = None

    @torch.no_grad()
    def _remember(self, projected: Projected, inputs: AttentionInputs) -> None:
        latest = self.method.remember(_class_attention(projected, inputs), self._memory())
        if self.total is not None:
            before = None if self.memory is None else self.memory.unsqueeze(-1)
            latest = self.total.unmerge(latest.unsqueeze(-1), before).squeeze(-1)
        self.memory = latest

    def _memory(self) -> Tensor | None:
        """Return what is remembered of the tokens that are left, (B, G)."""
        if self.memory is None or self.total is None:
            return self.memory
        return self.total.merge(self.memory.unsqueeze(-1)).squeeze(-1)

    def sizes(self) -> Tensor | None:
        """Return the sizes (B, G) for attention; without proportional attention, which tokens are hidden (size 0).

        Padding is hidden, and so are tokens that pass by.
        """
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

    def _view(self, index: int, target: int, projected: Projected | None) -> View:
        total, keys, values = self.total, None, None
        if projected is not None:
            keys = projected.k if projected.features is None else projected.features
            values = projected.v[:, :, : self.x.shape[1]]
        return View(
            tokens=self.x,
            keys=keys,
            values=values,
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
            block=index,
            depth=len(self.targets),
        )


def _class_attention(projected: Projected, inputs: AttentionInputs) -> Tensor:
    q, k = projected.q, projected.k
    sizes = of_keys(inputs.sizes, k)
    log_sizes = inputs.log_sizes if sizes is inputs.sizes else None  # not of further keys
    found = class_attention(q, k, sizes, scale=projected.scale, bias=projected.bias, log_sizes=log_sizes)
    return found[..., : q.shape[2]]


def ends_first(x: Tensor, ends: tuple[int, int]) -> Tensor:
    """Return tokens (B, T, C) with the suffix tokens moved behind the prefix tokens; ends counts both."""
    prefix, suffix = ends
    if suffix == 0:
        return x
    return torch.cat([x[:, :prefix], x[:, -suffix:], x[:, prefix:-suffix]], dim=1)


def in_library_order(x: Tensor, ends: tuple[int, int]) -> Tensor:
    """Return tokens (B, T, C) with the suffix tokens moved from behind the prefix tokens to the end."""
    prefix, suffix = ends
    if suffix == 0:
        return x
    return torch.cat([x[:, :prefix], x[:, prefix + suffix :], x[:, prefix : prefix + suffix]], dim=1)
