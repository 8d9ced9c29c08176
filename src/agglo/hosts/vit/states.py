"""Tokens after chosen blocks, as they leave the loop."""

from __future__ import annotations

from torch import Tensor

from agglo.hosts.vit.passing import Pass
from agglo.hosts.vit.restoring import full_length, in_library_order


class States:
    """Full-length states, or, where the plan wants that, as merged as they are.

    Merged states that are read side by side must have one token for each of the same groups. They get those of the
    deepest of them: of an earlier one the size-weighted means over their members.
    """

    def __init__(self, run: Pass) -> None:
        self.run = run
        self.merged = run.plan.merged
        self.together = run.plan.read_blocks if self.merged and len(run.plan.read_blocks) > 1 else ()
        self.kept: list[Tensor] = []
        self.waiting: dict[int, Tensor] = {}  # by their places in kept: full-length

    def keep(self, index: int) -> None:
        """Keep the tokens that a block left."""
        run, place = self.run, len(self.kept)
        self.kept.append(in_library_order(run.x, run.ends) if self.merged else run.full())
        if self.together and index == max(self.together) and run.total is not None:
            for earlier, full in self.waiting.items():
                self.kept[earlier] = in_library_order(run.total.merge(full), run.ends)
        elif index in self.together:
            self.waiting[place] = full_length(run.x, run.total, run.before_drops)
