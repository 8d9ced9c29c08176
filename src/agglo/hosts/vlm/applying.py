"""From what `agglo.apply` was asked for to what goes into a vision-language model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from agglo.hosts.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.vit.base import Host, Layout
from agglo.hosts.vlm.family import Family
from agglo.hosts.vlm.outlet import Outlet, at_connector, require_known_count
from agglo.hosts.vlm.registry import outlet_of, outlets
from agglo.methods import Method
from agglo.methods.pooling import Pooling
from agglo.plan import Plan

OUTPUTS = ("restored", "merged", "merged late", "smaller picture")


def require_output(output: str) -> None:
    if output not in OUTPUTS:
        raise ValueError(f"output={output!r} is not known; accepted: {', '.join(map(repr, OUTPUTS))}")


def late_outlet(model: nn.Module, family: Family, plan: Plan, method: Method, output: str) -> Outlet:
    """For a tower that runs whole: what the connector gives is merged once, or the picture is made smaller."""
    require_known_count(method, plan)
    shrink = family.shrink(model) if output == "smaller picture" else None
    by = at_connector(method) if shrink is None else Pooling()
    each = family.patches_per_token(model)
    return _tried(Outlet(_owner(model), family.dense(model), plan, 1, None, by, None, each, shrink))


def tower_outlet(model: nn.Module, family: Family, layout: Layout, plan: Plan, method: Method) -> Outlet:
    """For a tower that runs reduced: its groups are handed on, or the connector's outputs are merged as far."""
    require_known_count(method, plan)
    dense = family.dense(model)
    if not family.pointwise:
        each = family.patches_per_token(model)
        merging = at_connector(method)
        return _tried(Outlet(_owner(model), dense, plan, layout.depth, None, merging, method, each))
    deepest = max(plan.read_blocks)
    left = plan.counts(method, layout.patches, layout.depth, layout.grid)[deepest]
    return Outlet(_owner(model), dense, plan, layout.depth, handed_on=family.handed_on(model, layout, left))


def merged_plan(plan: Plan, model: Any, family: Family, depth: int, host: Host) -> Plan:
    """The plan of the tower of a model that is given fewer tokens."""
    if not family.pointwise:
        return plan
    if not host.may_stay_merged:
        raise UnsupportedModelError(
            f"the tower of this {type(model).__name__} is none of transformers' own, which alone can hand on merged "
            "tokens: output='merged late' merges them afterwards"
        )
    return replace(plan, merged=True, read_blocks=family.read_blocks(model, depth))


def image_tokens(model: nn.Module, dense: int | None = None) -> int:
    """See `agglo.image_tokens`."""
    found = outlets(model)
    if not found:
        raise ValueError(
            f"this {type(model).__name__} gives as many tokens as ever: call "
            "agglo.apply(model, ..., output='merged') first"
        )
    outlet = outlet_of(found[0])
    assert outlet is not None
    if dense is not None and (isinstance(dense, bool) or not isinstance(dense, int) or dense < 1):
        raise ValueError(f"dense={dense!r} must be a whole number of tokens, 1 or more")
    if None not in (dense, outlet.dense) and dense != outlet.dense:
        raise ValueError(f"dense={dense!r}: every picture of this model takes {outlet.dense} tokens without reduction")
    return outlet.count(dense)


def _owner(model: nn.Module) -> type[nn.Module]:
    owner = model.agglo_original if isinstance(model, ReducedModule) else type(model)
    definer = owner.get_image_features.__module__.split(".")[0]  # type: ignore[attr-defined]
    if definer != "transformers":
        raise UnsupportedModelError(
            f"{owner.__name__} replaces transformers' get_image_features (in {definer}); agglo cannot know its tokens"
        )
    return owner


def _tried(outlet: Outlet) -> Outlet:
    """An impossible request raises here, before anything changes, where the model says how many tokens it makes."""
    if outlet.dense is not None:
        outlet.count()
    return outlet
