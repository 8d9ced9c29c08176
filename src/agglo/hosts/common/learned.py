"""What a method learned, and what becomes of it when the method is applied again.

- The parameters of an instance are made once, when it is first applied, and never made anew: an instance whose
  parameters do not fit the model, or which works in another model, is refused. A forward pass that is still running
  with it is thus never disturbed.
- A method that is applied again by its name takes the parameters of the one applied before, the very same
  `nn.Parameter`s, so that optimisers go on with them. Where the options or the shapes differ it starts anew, and warns.
- New parameters come too late for wrappers that have collected a model's parameters already, which is refused, and for
  an optimiser made before, which cannot be seen: a warning comes where the model has gradients already.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from agglo.hosts.common.swap import UnsupportedModelError, holder_of, learned_method
from agglo.methods import Method, ModelShape

_COLLECTING = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
_CALLER = 4  # of agglo.apply, in the stack above `prepare`: what a warning points at


def prepare(
    method: Method, by_name: bool, shape: ModelShape, *, model: nn.Module, tower: nn.Module, loop: nn.Module
) -> Method:
    """The method ready to be applied, its parameters as the model has its own: same device, dtype and mode.

    method: what the user gave, or, by_name, a new instance of it.
    model: what the user gave. tower: the transformer in it. loop: the module that will hold the method.
    """
    builds = type(method).build is not Method.build
    if builds and not shape.width:
        raise UnsupportedModelError(f"{method.name} learns, and agglo cannot tell how wide {type(tower).__name__} is")
    if not isinstance(method, nn.Module):
        method.build(shape)
        return method
    before = learned_method(loop)
    if before is method:
        _require_fit(method, shape)
        return method
    _require_unused(method, loop)
    if getattr(method, "agglo_built", False):
        _require_fit(method, shape)
    else:
        method.build(shape)
    misfit = ""
    if by_name and before is not None and type(before) is type(method):
        misfit = _misfit(method, before)
        if not misfit:
            _take_over(method, before)
            return method
    if any(True for _ in method.parameters()):
        _require_not_collected(method, model, tower)
        _warn_of_gradients(method, tower)
    if misfit:
        warnings.warn(
            f"what {method.name} learned in this model is lost, its parameters start anew: {misfit}",
            stacklevel=_CALLER,
        )
    like = next(parameter for parameter in tower.parameters() if parameter.is_floating_point())
    return method.to(device=like.device, dtype=like.dtype).train(tower.training)


def mark_built(method: Method) -> None:
    """Note that the parameters of a method are made. On the instance: its copies and pickles have them too."""
    if isinstance(method, nn.Module):
        method.agglo_built = True  # type: ignore[assignment]


def _require_unused(method: nn.Module, loop: nn.Module) -> None:
    holder = holder_of(method)
    if holder is not None and holder is not loop:
        raise ValueError(
            f"this {type(method).__name__} is in use in another model ({type(holder).__name__}), which would learn the "
            "same parameters: make a second one (copy.deepcopy keeps what it learned), or agglo.remove it there first"
        )


def _require_fit(method: Method, shape: ModelShape) -> None:
    """ValueError unless building the method for the shape would give the shapes that its parameters have."""
    assert isinstance(method, nn.Module)
    probe = copy.deepcopy(method)
    with torch.random.fork_rng(devices=()):  # what the probe draws is thrown away
        probe.build(shape)
    if difference := _difference(probe, method):
        raise ValueError(
            f"this {type(method).__name__} has parameters that do not fit what is asked for ({difference}), and they "
            f"are not made anew: give a new instance, or the name {method.name!r}"
        )


def _misfit(method: Method, before: nn.Module) -> str:
    """In words, why a newly built method cannot have the parameters of another instance; empty if it can."""
    assert isinstance(method, nn.Module)
    assert isinstance(before, Method)
    if method.options() != before.options():
        return f"{before!r} was applied, {method!r} is asked for"
    return _difference(method, before)


def _take_over(method: nn.Module, before: nn.Module) -> None:
    """Let a newly built method have the very parameters of the instance before it."""
    for name, module in before.named_modules():
        twin = method.get_submodule(name)
        twin._parameters = dict(module._parameters)
        twin._buffers = dict(module._buffers)
        twin.training = module.training


def _difference(new: nn.Module, old: nn.Module) -> str:
    """In words, the first tensor that only one of two modules has, or that has two shapes; empty if there is none."""
    wanted, there = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (new, old))
    for name in sorted(wanted.keys() | there.keys()):
        shapes = [tuple(tensors[name].shape) if name in tensors else None for tensors in (there, wanted)]
        if shapes[0] != shapes[1]:
            had, needed = ("nothing" if shape is None else str(shape) for shape in shapes)
            return f"{name}: {had} there, {needed} needed"
    return ""


def _require_not_collected(method: Method, model: nn.Module, tower: nn.Module) -> None:
    for wrapper in model.modules():
        kind = next((cls.__name__ for cls in type(wrapper).__mro__ if cls.__name__ in _COLLECTING), None)
        if kind is not None and any(module is tower for module in wrapper.modules()):
            raise ValueError(
                f"{method.name} brings parameters of its own, and {kind} has collected this model's already, so that "
                "they would never be synchronised: call agglo.apply before wrapping"
            )


def _warn_of_gradients(method: Method, tower: nn.Module) -> None:
    if any(parameter.grad is not None for parameter in tower.parameters()):
        warnings.warn(
            f"this model has gradients already, so that an optimiser may have been made before {method.name} brought "
            "parameters of its own: make it after agglo.apply, or give it these by add_param_group",
            stacklevel=_CALLER + 1,
        )
