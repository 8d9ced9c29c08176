"""Tokens that leave a tower as merged as they are: one per group, in order of the groups' first members."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from agglo.hosts.vit.passing import Pass
from agglo.hosts.vit.restoring import full_length, in_library_order
from agglo.plan import Plan


def leaving(run: Pass) -> Tensor:
    """The tokens at hand, (B, G, C)."""
    return in_library_order(run.x, run.ends)


class MergedStates:
    """Hidden states for those who asked for them.

    States that are read side by side must have one token for each of the same groups. They get those of the deepest of
    them: of an earlier one the size-weighted means over their members. Everybody is told when these groups are known.
    """

    def __init__(self, plan: Plan) -> None:
        self.together = plan.read_blocks if len(plan.read_blocks) > 1 else ()
        self.waiting: list[tuple[Callable[[Tensor], None], Tensor, Tensor | None]] = []

    def after(self, index: int, run: Pass, tell: Callable[[Tensor], None]) -> None:
        """Let somebody know of the tokens that a block left."""
        deepest = max(self.together, default=-1)
        if index > deepest:
            tell(leaving(run))
            return
        earlier = index in self.together and index < deepest
        full = full_length(run.x, run.total, run.before_drops) if earlier else None
        self.waiting.append((tell, leaving(run), full))
        if index == deepest:
            for tell_one, state, all_tokens in self.waiting:
                if all_tokens is not None and run.total is not None:
                    state = in_library_order(run.total.merge(all_tokens), run.ends)
                tell_one(state)
            self.waiting = []
