"""What a host must say about a library's models. docs/hosts.md builds one, and `agglo.testing` tests it.

A host is listed in `hosts/registry.py` or given to `agglo.register_host`. Its mixin overrides the method that loops
over blocks, by a function marked `@begins_pass` (swap.py) that runs a `BlockLoop` (loop.py). `Parts` (blocks.py) say
how a block comes apart.

- Parts call the block's own submodules, so that adapters, hooks on linear layers and quantised layers work. A host that
  must use weights directly refuses what it would bypass.
- The module's class may be swapped back while an override runs, so it never calls other methods of its mixin.
- Host files import their library inside functions: they are read when it may not be installed.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.compiling import constant_result
from agglo.hosts.common.swap import Head, ReducedModule, Setting, UnsupportedModelError
from agglo.methods import Grid


@dataclass(frozen=True)
class Layout:
    """A model in numbers. Weights count the matrix entries that each token is multiplied with in one block."""

    depth: int
    prefix: int  # tokens that are never merged
    patches: int  # at the model's own input size
    attention_weights: int
    attention_width: int  # heads times head width
    mlp_weights: int
    embedding_weights: int = 0  # for each patch
    head_madds: int = 0  # for each image
    width: int = 0  # of a token; methods that learn need it, and heads
    heads: int = 0
    grid: Grid | None = None  # (rows, columns) of the patches, where the host knows
    query_side_params: int = 0  # attention_weights that only queries meet: of output projection, and query's if apart
    suffix: int = 0  # those of prefix that are at the end

    def gflops(self, counts: list[int], n_tokens: int, before_block: bool = False, n_front: int | None = None) -> float:
        """Return the multiply-adds of an image, in 1e9: papers' FLOPs, without those of the method itself.

        Args:
            counts: Patches left by each block, between its attention and MLP, or before both.
            n_tokens: Patches of the image.
            before_block: Whether they are left before both.
            n_front: Tokens in front, if the last block runs only for these.
        """
        total, tokens = self.head_madds + n_tokens * self.embedding_weights, self.prefix + n_tokens
        for block, count in enumerate(counts, start=1):
            if before_block:
                tokens = self.prefix + count
            front = n_front if block == len(counts) else None
            queries = tokens if front is None else front
            total += tokens * (self.attention_weights - self.query_side_params) + queries * self.query_side_params
            total += 2 * queries * tokens * self.attention_width
            tokens = self.prefix + count
            total += (tokens if front is None else front) * self.mlp_weights
        return total / 1e9


@lru_cache(maxsize=4096)  # called for every module of a model, by every host
def _names_of(kind: type) -> frozenset[str]:
    """Return the names of a class and those it inherits from, with their packages."""
    return frozenset(f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in kind.__mro__)


class Host(ABC):
    """One library's models. See the module docstring."""

    model_classes: ClassVar[tuple[str, ...]]  # those it reduces, as "package.ClassName"
    may_stay_merged: ClassVar[bool] = False  # whether its loops can do `Plan.merged`
    rates_are_nested: ClassVar[bool] = False  # whether keep rates are of the tokens that are left: Stages(nested=True)

    def recognises(self, module: nn.Module) -> bool:
        """Return whether the module is of one of the classes. By name: the library may be absent."""
        kind: Any = type(module)
        return not _names_of(kind).isdisjoint(self.model_classes)

    @abstractmethod
    def check(self, module: nn.Module) -> None:
        """Raise UnsupportedModelError for a recognised class whose blocks cannot be taken apart."""

    def prove(self, module: nn.Module) -> None:  # noqa: B027 a host need not
        """Raise UnsupportedModelError if a block taken apart does not give what the library's does (`probe.py`)."""

    @abstractmethod
    def layout(self, module: nn.Module) -> Layout:
        """Return the model in numbers."""

    def loop(self, module: nn.Module) -> nn.Module:
        """Return the submodule that owns the loop over blocks, the smallest there is: every call should pass it."""
        return module

    @abstractmethod
    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        """Return the overrides for the module's loop."""

    def grid_forwarding(self, module: nn.Module) -> tuple[type[ReducedModule], Setting] | None:
        """Return another class and setting for the tower, where its loop needs them to know where patches are."""
        return None

    def head(self, model: nn.Module, module: nn.Module) -> Head:
        """Return what reads the tokens that the module's loop gives, in the model that holds it.

        Raises:
            UnsupportedModelError: It reads more than prefix tokens.
        """
        raise UnsupportedModelError(
            "last_block='class_token' is for models whose head reads the class token alone, and agglo does not know "
            f"that of {type(module).__name__}"
        )


# By name, so that agglo need not import FSDP: a module of these classes gathers its weights when it is called.
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


def require_whole_blocks(tower: nn.Module) -> None:
    """Raise UnsupportedModelError if FSDP shards the tower block by block.

    Blocks are in lists. Other modules that are sharded (a patch embedding, a whole encoder) are called as usual.
    """
    for list_name, listed in tower.named_modules():
        if not isinstance(listed, (nn.ModuleList, nn.Sequential)):
            continue
        for name, module in listed.named_modules(prefix=list_name):
            if any(cls.__name__ in _SHARDED for cls in type(module).__mro__):
                raise UnsupportedModelError(
                    f"{name!r} of this {type(tower).__name__} is sharded by itself ({type(module).__name__}): FSDP "
                    "gathers its weights when it is called, and a block that reduces is not called, it runs in parts. "
                    "Shard the model as one unit: agglo.apply(model, ...), then fully_shard(model) and none of its "
                    "blocks; see docs/deploying.md"
                )


def overridden_methods(module: nn.Module, methods: Sequence[str], package: str) -> list[str]:
    """Return those of a module's methods that its class does not have from its library."""
    found = {name: getattr(type(module), name) for name in methods if hasattr(type(module), name)}
    definers = {name: method.__module__.split(".")[0].removesuffix("_modules") for name, method in found.items()}
    return [name for name, definer in definers.items() if definer not in (package, "agglo")]


def require_own(module: nn.Module, methods: Sequence[str], package: str) -> None:
    """Raise UnsupportedModelError if a method that is not the library's decides which tokens the head reads."""
    replaced = overridden_methods(module, methods, package) + [name for name in methods if name in vars(module)]
    if replaced:
        raise UnsupportedModelError(
            f"last_block='class_token' needs to know which tokens the head reads, and {type(module).__name__} has a "
            f"{replaced[0]} of its own in place of that of {package}"
        )


def require_no_bypass(module: nn.Module, methods: Sequence[str], package: str) -> None:
    """Raise UnsupportedModelError if a method that is not the library's is in the place of one that agglo overrides."""
    for name in overridden_methods(module, methods, package):
        raise UnsupportedModelError(
            f"{type(module).__name__} replaces {name} of {package} (in {getattr(type(module), name).__module__}); "
            "agglo would bypass it"
        )


def matrix_entries(*modules: nn.Module | Tensor | None) -> int:
    """Return the entries of all weight matrices in the modules: the multiply-adds of one token passing through."""
    found = [module for module in modules if module is not None]
    parameters = [p for part in found for p in ([part] if isinstance(part, Tensor) else part.parameters())]
    return sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)


def bound_arguments(module: type[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by their names in its `forward`, however they were given."""
    return {**dict(zip(_argument_names(module), args, strict=False)), **kwargs}


@constant_result
def _argument_names(module: type[nn.Module]) -> tuple[str, ...]:
    return _found_argument_names(cast(Any, module))


@cache
def _found_argument_names(module: type[nn.Module]) -> tuple[str, ...]:
    _, *names = inspect.signature(module.forward).parameters
    return tuple(names)


def refuse_given(**arguments: Any) -> None:
    """Raise ValueError if an argument says which tokens may see which, to which a group has several answers.

    None and False say nothing, nor does a list of None, one for each layer.
    """
    for name, value in arguments.items():
        is_empty = isinstance(value, list) and all(each is None for each in value)
        if value is not None and value is not False and not is_empty:
            raise refusal(name)


def refusal(name: str) -> ValueError:
    """Return the error that says that an argument cannot be honoured."""
    return ValueError(f"{name} does not go with token reduction: call agglo.remove(model) first")
