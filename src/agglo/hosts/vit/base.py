"""What a host file must say about a library's models. Everything else is shared.

A host is a subclass of `Host` in a file of its own, listed in `hosts/registry.py`:

    model_classes   the classes it reduces, as "package.ClassName", "package" being what their import begins with
    check(module)   raise UnsupportedModelError for variants that cannot be taken apart
    layout(module)  a `Layout`: depth, tokens, width and heads, and the multiply-adds of one block, for reports
    loop(module)    the submodule whose method holds the loop over blocks; by default the module itself
    mixin(module)   a `ReducedModule` subclass with overrides of the loop's method, and of others that run blocks

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
are read when it may not be installed. `tests/hosts/test_own_host.py` writes a host by this description.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from agglo.hosts.swap import ReducedModule
from agglo.methods import Grid


@dataclass(frozen=True)
class Projected:
    """What a block's attention works on, (B, H, T, d) each.

    features: keys to compare tokens by where they are not k itself (before rotation, say).
    gate: what `join` multiplies its output by, where a library has that.
    scale: of the dot products; None means 1 / sqrt(d).
    dropout: probability of attention dropout, 0 unless the block trains.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    features: Tensor | None = None
    gate: Tensor | None = None
    scale: float | None = None
    dropout: float = 0.0


class Parts(ABC):
    """How a block of a library comes apart. `rotary` is the block's table (..., T - prefix, 2d), or None."""

    @abstractmethod
    def whole(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Tensor:
        """The block as the library runs it: x (B, T, C) -> (B, T, C)."""

    @abstractmethod
    def project(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Projected:
        """First norm and the q, k, v projections of x (B, T, C)."""

    @abstractmethod
    def join(self, block: nn.Module, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        """x (B, T, C) plus the output projection of attended (B, H, T, d)."""

    @abstractmethod
    def feed(self, block: nn.Module, x: Tensor) -> Tensor:
        """x (B, T, C) plus the MLP branch."""


@dataclass(frozen=True)
class Layout:
    """A model in numbers. Weights count the matrix entries each token is multiplied with in one block.

    patches: patch tokens at the model's own input size.
    attention_width: heads times head width.
    embedding_weights: of the patch embedding, for each patch.
    head_madds: of the head, for each image.
    width, heads: channels of a token and heads of attention; methods that learn need them.
    grid: (rows, columns) of the patches, where the host knows.
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

    def gflops(self, counts: list[int], n_tokens: int, before_block: bool = False) -> float:
        """Multiply-adds of an image of n_tokens patches, in 1e9: papers' FLOPs, without those of the method itself.

        counts: patches left by each block, between its attention and MLP, or before both.
        """
        total, tokens = self.head_madds + n_tokens * self.embedding_weights, self.prefix + n_tokens
        for count in counts:
            if before_block:
                tokens = self.prefix + count
            total += tokens * self.attention_weights + 2 * tokens * tokens * self.attention_width
            tokens = self.prefix + count
            total += tokens * self.mlp_weights
        return total / 1e9


class Host(ABC):
    """One library's models. See the module docstring."""

    model_classes: ClassVar[tuple[str, ...]]

    def recognises(self, module: nn.Module) -> bool:
        """Whether the module is, or inherits from, one of the classes. By their names: the library may be absent."""
        names = {f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in type(module).__mro__}
        return not names.isdisjoint(self.model_classes)

    @abstractmethod
    def check(self, module: nn.Module) -> None:
        """UnsupportedModelError for a recognised class whose blocks are of a kind that cannot be taken apart."""

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


def matrix_entries(*modules: nn.Module | None) -> int:
    """Entries of all weight matrices in the modules: the multiply-adds of one token passing through."""
    return sum(p.numel() for module in modules if module is not None for p in module.parameters() if p.dim() > 1)
