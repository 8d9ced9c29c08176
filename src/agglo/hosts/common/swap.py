"""Running a module reduced by giving it another class, with overrides in front of the original's methods.

Overrides are in a subclass swapped into the module (`module.__class__`), not on the instance, so that copies, pickles
and data-parallel replicas run themselves and not the original. State of a forward pass is in its local variables.

A forward pass may run in one thread while another thread applies or removes a reduction:

- All that `apply` decides is one immutable value in one attribute (`agglo_applied`), which a pass reads once, at its
  beginning (`@begins_pass`). From then on an override calls functions, never methods of its mixin.
- The value is put in place before the class, and taken away after it.
- A pass that finds the value gone, since it was removed after Python had looked up the override, starts again with
  what the module's class says by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from agglo import tracing
from agglo.config import ReductionConfig
from agglo.methods import Grid, Method
from agglo.plan import Plan

Targets = dict[tuple[int, int, Grid | None], list[int | None]]
CHANGING = threading.RLock()  # models are reduced and released one after the other

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# transformers leaves these on layers once hidden states were asked for; outside of such a call they collect nothing.
_SILENT_HOOKS = ("transformers.utils.output_capturing", "transformers.utils.generic")


class UnsupportedModelError(TypeError):
    """The model is not one that agglo knows how to reduce.

    >>> try:
    ...     agglo.apply(torch.nn.Linear(2, 2), keep_rate=0.5)
    ... except agglo.UnsupportedModelError:
    ...     print("nothing was changed")
    nothing was changed
    """


@dataclass(frozen=True)
class Known:
    """What passes found out about a model, for the passes to come."""

    targets: Targets = field(default_factory=dict)
    blocks: dict[type, Any] = field(default_factory=dict)  # how those of a class come apart


class Setting:
    """Base of what `agglo.apply` puts into a module: one immutable value."""


@dataclass(frozen=True)
class Applied(Setting):
    """What `agglo.apply` put into a module that owns a loop over blocks."""

    plan: Plan
    method: Method
    config: ReductionConfig
    known: Known = field(default_factory=Known, compare=False, repr=False)


@dataclass(frozen=True)
class Healing:
    """What a model with healed parameters carries as `agglo_healing`.

    Attributes:
        config: The reduction that they were trained for.
        before: The parameters and what they were; empty where the model was loaded with healed weights.
    """

    config: ReductionConfig
    before: tuple[tuple[nn.Parameter, Tensor], ...] = ()


@dataclass(frozen=True)
class PassSetup:
    """The settings of one forward pass from its beginning to its end, whatever is applied or removed meanwhile."""

    plan: Plan
    method: Method
    traces: tuple[tracing.Trace, ...] = ()
    known: Known = field(default_factory=Known)
    front_only: bool = False  # whether the caller of this pass reads only `plan.reads` tokens in front

    def targets(self, n_patches: int, depth: int, grid: Grid | None) -> list[int | None]:
        """Return `Plan.targets`, found once for each size of image."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.plan.targets(self.method, n_patches, depth, grid)
        key = n_patches, depth, grid
        if key not in self.known.targets:
            self.known.targets[key] = self.plan.targets(self.method, n_patches, depth, grid)
        return self.known.targets[key]


class ReducedModule:
    """Base of the mixins: attributes of a reduced module, and how it is copied and pickled.

    A method that learns is a submodule, agglo_method.
    """

    agglo_original: ClassVar[type[nn.Module]]
    agglo_mixin: ClassVar[type[ReducedModule]]
    agglo_applied: Setting

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return (_blank, (self.agglo_mixin, self.agglo_original), *state)


def original_class(module: Any) -> Any:
    """Return the class that a module has without agglo, whether or not it is reduced now."""
    return getattr(type(module), "agglo_original", type(module))


def are_watched(modules: Iterable[nn.Module]) -> bool:
    """Return whether a hook on one of the modules would notice that tokens are missing.

    Hooks on all modules at once do not count: they are those of profilers and FLOP counters.
    """
    hooks = (hook for module in modules for name in _HOOKS for hook in getattr(module, name).values())
    return any(not str(getattr(hook, "__module__", "")).startswith(_SILENT_HOOKS) for hook in hooks)


def begins_pass(override: Callable[..., Any]) -> Callable[..., Any]:
    """Mark an overriding method as the beginning of a forward pass.

    After self it is given the `PassSetup`, or, outside of loops over blocks, the setting itself.
    """

    @wraps(override)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        setting = getattr(self, "agglo_applied", None)
        setup = setup_of(self) if isinstance(setting, Applied) else setting
        if setup is None:
            # The method of the class: a wrapper on the instance (accelerate's) may be what called this.
            return getattr(type(self), override.__name__)(self, *args, **kwargs)
        return override(self, setup, *args, **kwargs)

    begin.begins_pass = True  # type: ignore[attr-defined]
    return begin


def _signed_as(original: Callable[..., Any], override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an override under the name and signature of the original, which libraries look at."""

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return override(self, *args, **kwargs)

    return call


class StandIn:
    """An object with other values for some of its attributes, given to methods as self.

    The object itself, which other threads see, stays as it is.
    """

    def __init__(self, original: Any, **instead: Any) -> None:
        self._original = original
        for name, value in instead.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def setup_of(module: Any) -> PassSetup | None:
    """Return the settings of a pass of the module that begins now; None if nothing is applied to it."""
    applied: Applied | None = getattr(module, "agglo_applied", None)
    if applied is None:
        return None
    method = applied.method
    if isinstance(method, nn.Module) and getattr(module, "_is_replica", False):
        method = module.agglo_method  # DataParallel's copy of it, on the replica's device
    # The flag comes first: torch.compile can guard on it in every version, but on context variables only in new ones.
    traces = tracing.traces_of(module) if tracing.any_open else ()
    return PassSetup(applied.plan, method, traces, applied.known)


def install(module: nn.Module, mixin: type[ReducedModule], applied: Setting) -> None:
    """Let a module run reduced from the next forward pass on."""
    _require_own_class(module)
    method = applied.method if isinstance(applied, Applied) else None
    _set_submodule(module, method if isinstance(method, nn.Module) else None)
    module.agglo_applied = applied  # type: ignore[assignment]
    module.__class__ = reduced_class(mixin, original_class(module))


def uninstall(module: nn.Module) -> None:
    """Let a module run as its library wrote it from the next forward pass on, with nothing left in it."""
    if isinstance(module, ReducedModule):
        _require_own_class(module)
        module.__class__ = module.agglo_original  # type: ignore[assignment]
        del module.agglo_applied
        _set_submodule(module, None)


def healing_of(model: nn.Module) -> Healing | None:
    """Return what `agglo.heal`, or loading its weights, left in a model; None if there is nothing."""
    found = (vars(module).get("agglo_healing") for module in model.modules())
    return next((healing for healing in found if healing is not None), None)


@torch.no_grad()
def put_back(model: nn.Module) -> None:
    """Give the parameters that `agglo.heal` trained in this model the values of before."""
    for module in model.modules():
        healing: Healing | None = vars(module).get("agglo_healing")
        if healing is not None and healing.before:
            for parameter, value in healing.before:
                parameter.copy_(value)
            del module.agglo_healing


def _require_own_class(module: nn.Module) -> None:
    """Raise RuntimeError if the class was swapped again after agglo did it: it cannot be swapped back under theirs."""
    if isinstance(module, ReducedModule) and "agglo_original" not in vars(type(module)):
        raise RuntimeError(
            f"after agglo.apply something (parametrize, fully_shard) gave {module.agglo_original.__name__} another "
            "class; undo that before agglo.remove or another agglo.apply"
        )


def _set_submodule(module: nn.Module, method: nn.Module | None) -> None:
    """Put a method that learns among the submodules, where optimisers find it, or take it out.

    The dictionary is a new one, since another thread may be iterating over the old one.
    """
    others = {name: child for name, child in module._modules.items() if name != "agglo_method"}
    if method is not None:
        others["agglo_method"] = method
    if method is not None or len(others) < len(module._modules):
        module._modules = others


_reduced_classes: dict[tuple[type[ReducedModule], type[nn.Module]], type[nn.Module]] = {}


def reduced_class(mixin: type[ReducedModule], original: type[nn.Module]) -> type[nn.Module]:
    """Return the original class with the mixin in front, under the original's name: libraries look at class names."""
    if (mixin, original) not in _reduced_classes:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        made = type(original.__name__, (mixin, original), {**names, "agglo_original": original, "agglo_mixin": mixin})
        for name in {name for cls in mixin.__mro__ for name in vars(cls) if hasattr(original, name)}:
            if getattr(override := getattr(made, name), "begins_pass", False):
                setattr(made, name, _signed_as(getattr(original, name), override))
        # setdefault, so that threads that come here together leave with the same class
        _reduced_classes.setdefault((mixin, original), made)
    return _reduced_classes[mixin, original]


def _blank(mixin: type[ReducedModule], original: type[nn.Module]) -> nn.Module:
    """Return an empty instance for copy and pickle to fill."""
    return (cls := reduced_class(mixin, original)).__new__(cls)


def require_no_override(loop: nn.Module, mixin: type[ReducedModule]) -> None:
    """Refuse a function put on the instance, which goes before its class: the reduction would silently not happen."""
    ours = {name for cls in mixin.__mro__ if issubclass(cls, ReducedModule) for name in vars(cls)}
    if theirs := sorted(ours.intersection(vars(loop))):
        raise UnsupportedModelError(
            f"{theirs[0]} of this {type(loop).__name__} was replaced on the instance (accelerate's hooks and mixed "
            "precision do this), so that agglo's would never run: call agglo.apply before that happens"
        )


@dataclass(frozen=True)
class Head:
    """The reader of tokens after the last block, which reads only the first ones."""

    reads: int  # tokens
    reader: nn.Module | None = None  # whose `forward` calls the loop and reads; None where the loop's own override does
    loop: str = ""  # the name of the loop's module in the reader
    watched: tuple[str, ...] = ()  # names of the reader's submodules that see what comes out of the last block
    settings: tuple[tuple[str, object], ...] = ()  # names and values of attributes with which it reads only these


@dataclass(frozen=True)
class Reading(Setting):
    """What `agglo.apply` put into a reader: its head, and the mixin of its loop."""

    head: Head
    mixin: type[ReducedModule]

    def holds(self, reader: Any, loop: nn.Module) -> bool:
        """Return whether nothing has come in between since `agglo.apply`."""
        same = all(getattr(reader, name) == value for name, value in self.head.settings)
        return same and not is_replaced(loop) and not are_watched([loop, *map(reader.get_submodule, self.head.watched)])


class ReducedReader(ReducedModule):
    """The override of a reader's `forward`, whose loop gives only the tokens in front where nothing watches it.

    The last block then needs keys and values of all tokens, but queries, output projection and MLP of those in front
    only. The output is the same but for rounding. All other callers of the loop's module get all tokens. Where head and
    loop are in one module (timm), the host's own override of `forward` does this.
    """

    @begins_pass
    def forward(self: Any, reading: Reading, *args: Any, **kwargs: Any) -> Any:
        reader, loop = self, getattr(self, reading.head.loop)
        setup = setup_of(loop)
        if setup is not None and setup.plan.reads is not None and reading.holds(self, loop):
            # The override itself, not the loop's method: that one would ask anew what is applied.
            override = reading.mixin.forward.__wrapped__  # type: ignore[attr-defined]
            reader = StandIn(self, **{reading.head.loop: partial(override, loop, replace(setup, front_only=True))})
        return original_class(self).forward(reader, *args, **kwargs)


def is_replaced(module: nn.Module) -> bool:
    """Return whether a call of the module ends elsewhere than in its class's `forward`."""
    return module._compiled_call_impl is not None or "forward" in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether rows of the module's weight can be used apart: no adapter, quantisation or hook is in between."""
    if type(module) is not nn.Linear or is_replaced(module) or are_watched([module]):
        return False
    return all(type(each) in (Tensor, nn.Parameter) for each in (module.weight, module.weight.data))
