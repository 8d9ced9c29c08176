"""What a host file must say about a library's models. Everything else is shared.

A host is a subclass of `Host` in a file of its own, listed in `hosts/registry.py` or given to `agglo.register_host`:

    model_classes   the classes it reduces, as "package.ClassName", "package" being what their import begins with
    check(module)   raise UnsupportedModelError for variants that cannot be taken apart
    prove(module)   optional: run a block whole and in parts, and refuse the model if the two differ
    layout(module)  a `Layout`: depth, tokens, width and heads, and the multiply-adds of one block, for reports
    loop(module)    the submodule whose method holds the loop over blocks; by default the module itself
    mixin(module)   a `ReducedModule` subclass with overrides of the loop's method, and of others that run blocks
    head(model, module)     optional: a `Head`, for `last_block="class_token"`: how many tokens in front are read

An override is marked `@begins_pass` (hosts/common/swap.py), which gives it the setup of a pass. A `Loop`
(hosts/common/loop.py) calls the library's own method with blocks that run on fewer and fewer tokens:

    class MyLoop(Loop):
        blocks_name = "layers"

        def parts(self, block, given):
            return MyParts()

    @begins_pass
    def forward(self, setup, *args, **kwargs):
        return MyLoop(self, setup).call("forward", *args, **kwargs)

`Parts` (hosts/common/blocks.py) say how one block of this library comes apart into q, k, v projection, output
projection with residual, and MLP with residual. Calling the block's own submodules there keeps adapters, hooks on
linear layers and quantised layers working; a host that must use weights directly (`packed_attention`) refuses what it
would bypass. The module's class may be swapped back while the override runs: it calls functions, never other methods of
its mixin. Host files import their library inside functions, never at the top: they are read when it may not be
installed. docs/hosts.md walks through a host, and `agglo.testing` tests it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from torch import nn

from agglo.hosts.common.swap import ReducedModule, Setting, UnsupportedModelError
from agglo.methods import Grid


@dataclass(frozen=True)
class Layout:
    """A model in numbers. Weights count the matrix entries each token is multiplied with in one block.

    prefix: tokens that are never merged. suffix: those of them that are at the end.
    patches: patch tokens at the model's own input size.
    attention_width: heads times head width.
    embedding_weights: of the patch embedding, for each patch.
    head_madds: of the head, for each image.
    width, heads: channels of a token and heads of attention; methods that learn need them.
    grid: (rows, columns) of the patches, where the host knows.
    query_side_params: those of attention_weights that tokens meet as they ask, and not as they are asked: of the output
        projection, and of the query's unless `Parts.project_front` projects all tokens.
    """

    depth: int
    prefix: int
    patches: int
    attention_weights: int
    attention_width: int
    mlp_weights: int
    embedding_weights: int = 0
    head_madds: int = 0
    width: int = 0
    heads: int = 0
    grid: Grid | None = None
    query_side_params: int = 0
    suffix: int = 0

    def gflops(self, counts: list[int], n_tokens: int, before_block: bool = False, n_front: int | None = None) -> float:
        """Multiply-adds of an image of n_tokens patches, in 1e9: papers' FLOPs, without those of the method itself.

        counts: patches left by each block, between its attention and MLP, or before both.
        n_front: tokens in front for which alone the last block runs, if there it does not run for all.
        """
        total, tokens = self.head_madds + n_tokens * self.embedding_weights, self.prefix + n_tokens
        for block, count in enumerate(counts, start=1):
            if before_block:
                tokens = self.prefix + count
            front = n_front if block == len(counts) else None
            asking = tokens if front is None else front
            total += tokens * (self.attention_weights - self.query_side_params) + asking * self.query_side_params
            total += 2 * asking * tokens * self.attention_width
            tokens = self.prefix + count
            total += (tokens if front is None else front) * self.mlp_weights
        return total / 1e9


@dataclass(frozen=True)
class Head:
    """Who reads tokens after the last block, and no others than the first ones.

    reads: how many.
    reader: the module whose `forward` calls the loop and reads; None where that is the loop's own override, which says
        so by `replace(setup, front_only=True)`.
    loop: the name of the loop's module in the reader.
    watched: names of the reader's submodules that see what comes out of the last block.
    settings: attributes of the reader, by name, and the values with which it reads like that.
    """

    reads: int
    reader: nn.Module | None = None
    loop: str = ""
    watched: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()


@lru_cache(maxsize=4096)  # asked for every module of a model, by every host
def _names_of(kind: type) -> frozenset[str]:
    """Of a class and those it inherits from, with their packages."""
    return frozenset(f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in kind.__mro__)


class Host(ABC):
    """One library's models. See the module docstring."""

    model_classes: ClassVar[tuple[str, ...]]
    may_stay_merged: ClassVar[bool] = False  # whether its loops can do `Plan.merged`
    rates_are_nested: ClassVar[bool] = False  # whether a keep rate is of the tokens at hand: `Stages(..., nested=True)`

    def recognises(self, module: nn.Module) -> bool:
        """Whether the module is, or inherits from, one of the classes. By their names: the library may be absent."""
        kind: Any = type(module)
        return not _names_of(kind).isdisjoint(self.model_classes)

    @abstractmethod
    def check(self, module: nn.Module) -> None:
        """UnsupportedModelError for a recognised class whose blocks are of a kind that cannot be taken apart."""

    def prove(self, module: nn.Module) -> None:  # noqa: B027 a host need not
        """UnsupportedModelError if a block taken apart does not give what the library's block gives (`probe.py`).

        Called by `apply` after `check`, unless the user says `probe=False`.
        """

    @abstractmethod
    def layout(self, module: nn.Module) -> Layout:
        """The model in numbers."""

    def loop(self, module: nn.Module) -> nn.Module:
        """The submodule that owns the loop over blocks.

        The smaller it is, the more ways of calling the model end there: a subclass with a forward of its own, an
        encoder called for its features.
        """
        return module

    @abstractmethod
    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        """The overrides for the module's loop."""

    def grid_forwarding(self, module: nn.Module) -> tuple[type[ReducedModule], Setting] | None:
        """Another class for the tower and what it goes by, where its loop needs that to know where patches are."""
        return None

    def head(self, model: nn.Module, module: nn.Module) -> Head:
        """What reads the tokens that the module's loop gives, in the model that holds it.

        UnsupportedModelError that says why, unless it reads prefix tokens alone.
        """
        raise UnsupportedModelError(
            "last_block='class_token' is for models whose head reads the class token alone, and agglo does not know "
            f"that of {type(module).__name__}"
        )


def overridden_methods(module: nn.Module, methods: Sequence[str], package: str) -> list[str]:
    """Those of a module's methods that its class has from somebody else than its library."""
    definers = {name: getattr(type(module), name).__module__.split(".")[0] for name in methods}
    return [name for name, definer in definers.items() if definer not in (package, "agglo")]


def require_own(module: nn.Module, methods: Sequence[str], package: str) -> None:
    """Raise UnsupportedModelError if somebody else's method decides which tokens the head reads."""
    replaced = overridden_methods(module, methods, package) + [name for name in methods if name in vars(module)]
    if replaced:
        raise UnsupportedModelError(
            f"last_block='class_token' needs to know which tokens the head reads, and {type(module).__name__} has a "
            f"{replaced[0]} of its own in place of that of {package}"
        )


def matrix_entries(*modules: nn.Module | None) -> int:
    """Entries of all weight matrices in the modules: the multiply-adds of one token passing through."""
    return sum(p.numel() for module in modules if module is not None for p in module.parameters() if p.dim() > 1)
