"""What a host file must say about a library's models. Everything else is shared.

A host is a subclass of `Host` in a file of its own, listed in `hosts/registry.py` or given to `agglo.register_host`:

    model_classes   the classes it reduces, as "package.ClassName", "package" being what their import begins with
    check(module)   raise UnsupportedModelError for variants that cannot be taken apart
    prove(module)   optional: run a block whole and in parts, and refuse the model if the two differ
    layout(module)  a `Layout`: depth, tokens, width and heads, and the multiply-adds of one block, for reports
    loop(module)    the submodule whose method holds the loop over blocks; by default the module itself
    mixin(module)   a `ReducedModule` subclass with overrides of the loop's method, and of others that run blocks
    head(model, module)     optional: a `Head`, for `apply(..., unread="drop")`: how many tokens in front are read

An override is marked `@begins_pass` (hosts/swap.py), which gives it what the pass goes by. It prepares the tokens with
the module's own layers and hands them to the loop that all hosts share:

    @begins_pass
    def forward(self, setup, x):
        run = run_blocks(setup, list(self.layers), x, parts=..., prefix=..., training=self.training)
        return run.restored()               # or run.reduced, where only prefix tokens are read

`parts` is a `Parts` object: how one block of this library comes apart into q, k, v projection, output projection with
residual, and MLP with residual. Calling the block's own submodules there keeps adapters, hooks on linear layers and
quantised layers working; a host that must use weights directly (`packed_attention`) refuses what it would bypass.
Prefix tokens come first in x (B, T, C). The module's class may be swapped back while the override runs: it calls
functions, never other methods of its mixin. Host files import their library inside functions, never at the top: they
are read when it may not be installed. docs/hosts.md walks through a host, and `agglo.testing` tests it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor, nn

from agglo.hosts.swap import ReducedModule, Setting, UnsupportedModelError
from agglo.methods import Grid


@dataclass(frozen=True)
class Projected:
    """What a block's attention works on, (B, H, T, d) each. Behind the others there may be keys and values that belong
    to no token; features are then needed, of tokens alone.

    features: keys to compare tokens by where they are not k itself (before rotation, say).
    gate: what `join` multiplies its output by, where a library has that.
    scale: of the dot products; None means 1 / sqrt(d).
    dropout: probability of attention dropout, 0 unless the block trains.
    bias: (B or 1, H or 1, T, T), added to the attention logits. One that goes by the positions of tokens is not for
        `project` to give, which sees merged tokens: hand `run_blocks` a `RelativeBias`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    features: Tensor | None = None
    gate: Tensor | None = None
    scale: float | None = None
    dropout: float = 0.0
    bias: Tensor | None = None


class Parts(ABC):
    """How a block of a library comes apart. `rotary` is the block's table (..., T - prefix, 2d), or None.

    treats_images_alike: whether a block may be given some images of a batch alone: not where it knows of something that
        is each image's own.
    needs_all_tokens: whether `whole` is given, beside the tokens, something that goes by their original number.
    never_whole: whether the library's own block cannot take the tokens as they are.
    """

    treats_images_alike: bool = True
    needs_all_tokens: bool = False
    never_whole: bool = False

    @abstractmethod
    def whole(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Tensor:
        """The block as the library runs it: x (B, T, C) -> (B, T, C)."""

    @abstractmethod
    def project(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Projected:
        """First norm and the q, k, v projections of x (B, T, C)."""

    def project_front(self, block: nn.Module, x: Tensor, rotary: Tensor | None, n_front: int) -> Projected:
        """The same where only the first n_front tokens, prefix tokens all of them, ask: q and gate are of these alone.
        Here they are cut off what `project` gives; a host that can tell the projections apart spares the others."""
        projected = self.project(block, x, rotary)
        gate, bias = projected.gate, projected.bias
        return replace(
            projected,
            q=projected.q[:, :, :n_front],
            gate=None if gate is None else gate[:, :n_front],
            bias=None if bias is None else bias[:, :, :n_front],
        )

    def attend(self, block: nn.Module, projected: Projected, sizes: Tensor | None) -> Tensor | None:
        """Attention of a kind of its own, (B, H, T, d), for tokens of sizes (B, T) or of one patch each. None, unless a
        host says otherwise: softmax, in which a token weighs as much as its size says."""
        return None

    @abstractmethod
    def join(self, block: nn.Module, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        """x (B, T, C) plus the output projection of attended (B, H, T, d)."""

    @abstractmethod
    def feed(self, block: nn.Module, x: Tensor) -> Tensor:
        """x (B, T, C) plus the MLP branch."""


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
    asking_weights: those of attention_weights that tokens meet as they ask, and not as they are asked: of the output
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
    asking_weights: int = 0
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
            total += tokens * (self.attention_weights - self.asking_weights) + asking * self.asking_weights
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
        Called by `apply` after `check`, unless the user says `probe=False`."""

    @abstractmethod
    def layout(self, module: nn.Module) -> Layout:
        """The model in numbers."""

    def loop(self, module: nn.Module) -> nn.Module:
        """The submodule that owns the loop over blocks. The smaller it is, the more ways of calling the model end
        there: a subclass with a forward of its own, an encoder called for its features."""
        return module

    @abstractmethod
    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        """The overrides for the module's loop."""

    def sight(self, module: nn.Module) -> tuple[type[ReducedModule], Setting] | None:
        """Another class for the tower and what it goes by, where its loop needs that to know where patches are."""
        return None

    def head(self, model: nn.Module, module: nn.Module) -> Head:
        """What reads the tokens that the module's loop gives, in the model that holds it; UnsupportedModelError that
        says why, unless it reads prefix tokens alone."""
        raise UnsupportedModelError(
            f"unread='drop' is for models whose head reads the class token alone, and agglo does not know that of "
            f"{type(module).__name__}"
        )


def others(module: nn.Module, methods: Sequence[str], package: str) -> list[str]:
    """Those of a module's methods that its class has from somebody else than its library."""
    definers = {name: getattr(type(module), name).__module__.split(".")[0] for name in methods}
    return [name for name, definer in definers.items() if definer not in (package, "agglo")]


def require_own(module: nn.Module, methods: Sequence[str], package: str) -> None:
    """UnsupportedModelError, for `unread="drop"`, if somebody else's method decides which tokens are read."""
    replaced = others(module, methods, package) + [name for name in methods if name in vars(module)]
    if replaced:
        raise UnsupportedModelError(
            f"unread='drop' needs to know which tokens the head reads, and {type(module).__name__} has a {replaced[0]} "
            f"of its own in place of that of {package}"
        )


def matrix_entries(*modules: nn.Module | None) -> int:
    """Entries of all weight matrices in the modules: the multiply-adds of one token passing through."""
    return sum(p.numel() for module in modules if module is not None for p in module.parameters() if p.dim() > 1)
