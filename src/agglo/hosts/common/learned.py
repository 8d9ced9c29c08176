"""What a method learned, and what becomes of it when the method is applied again.

- The parameters of an instance are made once, when it is first applied: an instance that does not fit is refused.
- A method that is applied again by its name takes the same `nn.Parameter`s as before, so that optimisers go on with
  them. Where the options or the shapes differ it starts anew, and warns.
- New parameters come too late for wrappers that have collected a model's parameters already, which is refused.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from agglo.hosts.common.swap import Applied, UnsupportedModelError
from agglo.methods import Method, ModelShape

_COLLECTING = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
_CALLER = 4  # of agglo.apply, in the stack above `prepare`: what a warning points at


def prepare(
    method: Method, by_name: bool, shape: ModelShape, *, model: nn.Module, tower: nn.Module, loop: nn.Module
) -> Method:
    """Return the method ready to be applied: built, and on the device, in the dtype and mode of the tower.

    With by_name it is a new instance, which may take over the parameters of the one applied before.
    """
    if type(method).build is not Method.build and not shape.width:
        raise UnsupportedModelError(f"{method.name} learns, and agglo cannot tell how wide {type(tower).__name__} is")
    if not isinstance(method, nn.Module):
        method.build(shape)
        return method
    applied = getattr(loop, "agglo_applied", None)
    before: Any = applied.method if isinstance(applied, Applied) else None
    if not getattr(method, "agglo_built", False):
        method.build(shape)
    else:
        _require_fit(method, shape)
    if before is method:
        return method
    again = by_name and isinstance(before, nn.Module) and type(before) is type(method)
    misfit = ""
    if again and method.options() != before.options():
        misfit = f"{before!r} was applied, {method!r} is asked for"
    elif again:
        misfit = _difference(method, before)
    if again and not misfit:
        _take_over(method, before)
    else:
        if any(True for _ in method.parameters()):
            _require_not_collected(method, model, tower)
        if misfit:
            lost = f"what {method.name} learned in this model is lost, its parameters start anew: {misfit}"
            warnings.warn(lost, stacklevel=_CALLER)
        like = next(parameter for parameter in tower.parameters() if parameter.is_floating_point())
        method.to(device=like.device, dtype=like.dtype).train(tower.training)
    # On the instance: its copies and pickles have their parameters too.
    method.agglo_built = True  # type: ignore[assignment]
    return method


def _require_fit(method: Any, shape: ModelShape) -> None:
    """Raise ValueError unless building the method anew would give the shapes that its parameters have."""
    twin = copy.deepcopy(method)
    with torch.random.fork_rng(devices=()):
        twin.build(shape)
    if difference := _difference(twin, method):
        raise ValueError(
            f"the parameters of this {type(method).__name__} do not fit what is asked for ({difference}): give a new "
            f"instance, or the name {method.name!r}"
        )


def _take_over(method: nn.Module, before: Any) -> None:
    """Let a newly built method have the very parameters of the instance before it."""
    for name, module in before.named_modules():
        twin = method.get_submodule(name)
        twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
        twin.training = module.training


def _difference(new: nn.Module, old: nn.Module) -> str:
    """Describe the first tensor that only one of two modules has, or that has two shapes; empty if there is none."""
    needed, there = ({name: tuple(t.shape) for name, t in m.state_dict(keep_vars=True).items()} for m in (new, old))
    for name in sorted(needed.keys() | there.keys()):
        if needed.get(name) != there.get(name):
            return f"{name}: {there.get(name, 'nothing')} there, {needed.get(name, 'nothing')} needed"
    return ""


def _require_not_collected(method: Method, model: nn.Module, tower: nn.Module) -> None:
    for wrapper in model.modules():
        kind = next((cls.__name__ for cls in type(wrapper).__mro__ if cls.__name__ in _COLLECTING), None)
        if kind is not None and any(module is tower for module in wrapper.modules()):
            raise ValueError(
                f"{method.name} brings parameters of its own, and {kind} has collected this model's already, so that "
                "they would never be synchronised: call agglo.apply before wrapping"
            )
