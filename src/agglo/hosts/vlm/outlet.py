"""How many tokens a picture takes in the language model's prompt, and how the connector's outputs become so many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agglo.hosts.swap import Setting
from agglo.methods import Grid, Method, Outcome, View
from agglo.methods.base import square
from agglo.methods.helpers.validation import require_valid
from agglo.plan import Plan
from agglo.tracing import Step, Trace

# From the number of tokens along a side, and arguments of `get_image_features`, to others.
Shrink = Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Outlet(Setting):
    """What `agglo.apply` put into a vision-language model that is given fewer tokens.

    owner: the model's class before that.
    dense: tokens that a picture takes without reduction; None where pictures differ in size.
    plan, depth: of the tower, or of the outlet alone, which then counts as a model of one block.
    handed_on: tokens that a picture takes where the tower's own groups pass a connector that acts on each token alone.
        None where the connector's outputs are merged instead.
    method: by which they are. tower_method: that of the tower; None where the tower runs whole.
    patches_per_token: patches of the tower that the connector makes one token of.
    shrink: what makes pictures smaller, in place of merging; the method then says how many tokens are left.
    """

    owner: type[nn.Module]
    dense: int | None
    plan: Plan
    depth: int
    handed_on: int | None = None
    method: Method | None = None
    tower_method: Method | None = None
    patches_per_token: int = 1
    shrink: Shrink | None = None

    def count(self, dense: int | None = None, grid: Grid | None = None) -> int:
        """Tokens of a picture that takes `dense` of them without reduction.

        grid: (rows, columns) of these; None for a square, if they make one.
        """
        if self.handed_on is not None:
            return self.handed_on
        dense = self.dense if dense is None else dense
        if dense is None:
            raise ValueError(
                "how many tokens a picture of this model takes depends on its size: say how many it takes without "
                "reduction, as in agglo.image_tokens(model, 256)"
            )
        assert self.method is not None
        grid = square(dense) if grid is None else grid
        if self.tower_method is None:
            target = self.plan.targets(self.method, dense, 1, grid)[0]
            return dense if target is None else target
        patches, side = dense * self.patches_per_token, round(self.patches_per_token**0.5)
        patch_grid = None if grid is None else (grid[0] * side, grid[1] * side)
        left = self.plan.counts(self.tower_method, patches, self.depth, patch_grid)[-1]
        asked = dense * left // patches
        if asked < 1:
            raise ValueError(
                f"{self.plan.schedule!r} leaves {left} of {patches} patches, which is less than one of the {dense} "
                "tokens that the connector makes of them"
            )
        return dense if asked >= dense else self.method.stages(dense, [asked], grid)[0]

    def merge(self, tokens: Tensor, grid: Grid | None, training: bool) -> tuple[Tensor, Outcome | None]:
        """The connector's outputs (B, M, D) of pictures of one size as (B, K, D), and what the method decided."""
        n_tokens = int(tokens.shape[1])
        target = self.count(n_tokens, grid)
        if target >= n_tokens:
            return tokens, None
        assert self.method is not None
        view = View.of_patches(tokens, target, square(n_tokens) if grid is None else grid, training)
        outcome = self.method.reduce(view)
        require_valid(self.method, view, outcome)
        return outcome.new_tokens(tokens), outcome


@dataclass(frozen=True)
class Picture:
    """One picture, or tile of one, after the outlet.

    tokens: (K, D). labels: (M,), the group of each of the connector's outputs, -1 if it was dropped; None if none
    merged.
    """

    tokens: Tensor
    labels: Tensor | None


def merge_pictures(
    outlet: Outlet, pictures: Sequence[Tensor], grids: Sequence[Grid] | None, training: bool, traces: Sequence[Trace]
) -> list[Picture]:
    """Merge the connector's outputs (M, D) of each picture; those of one size together.

    traces: to whom that is reported, a pass for every size, as of block 0.
    """
    alike: dict[tuple[int, Grid | None], list[int]] = {}
    for index, tokens in enumerate(pictures):
        alike.setdefault((len(tokens), None if grids is None else grids[index]), []).append(index)
    done: dict[int, Picture] = {}
    for (_, grid), indices in alike.items():
        merged, outcome = outlet.merge(torch.stack([pictures[index] for index in indices]), grid, training)
        for place, index in enumerate(indices):
            done[index] = Picture(merged[place], None if outcome is None else outcome.grouping.labels[place])
        for trace in traces:
            trace.record([] if outcome is None else [Step(0, outcome, outcome.grouping)])
    return [done[index] for index in range(len(pictures))]


def at_connector(method: Method) -> Method:
    """The method as it merges what the connector gives: compared by the tokens themselves, since there are no keys.
    Of options with an entry for each reduction the last one holds. ValueError for a method that cannot."""
    if isinstance(method, nn.Module):
        raise ValueError(f"{method.name} learns for the tower's tokens, and this model merges the connector's")
    if method.needs_class_attention or method.needs_attention_received:
        raise ValueError(f"{method.name} asks what attention says, and there is none after the connector")
    if method.kind not in ("merges hard", "prunes"):
        raise ValueError(f"{method.name} {method.kind}; what the connector gives can be merged hard or pruned")
    options = {name: value[-1] if isinstance(value, list) else value for name, value in method.options().items()}
    if "features" in options:
        options["features"] = "tokens"
    return type(method)(**options)


def require_known_count(method: Method, plan: Plan) -> None:
    """ValueError unless every picture keeps the same number of tokens, known before it is seen."""
    if plan.schedule is None:
        raise ValueError(
            f"threshold={plan.threshold!r} leaves another number of tokens of every picture, and a prompt is written "
            "before it is seen: give keep_rate or schedule"
        )
    if method.varies != "no" or method.tokens_return != "never":
        raise ValueError(
            f"{method.name} does not leave a number of tokens that is known beforehand, which a prompt needs"
        )
