"""What agglo must know of a family of denoisers: where the self-attentions are, and the grids of their tokens.

A family recognises models by the blocks they are made of, so that a library's copies of an architecture under other
names work too. It never imports diffusers: blocks are known by the names of their classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from agglo.hosts.diffusion.state import Site

Axes = tuple[int, ...]
Argument = Callable[[str], Any]  # an argument of the model's forward, by its name; None if not given


@dataclass(frozen=True)
class Modules:
    """The modules of a site. role: which mixin its attentions get. cross, mlp: None where the block has none that
    could run with fewer tokens."""

    site: Site
    block: nn.Module
    attentions: tuple[nn.Module, ...]
    role: str
    cross: nn.Module | None = None
    mlp: nn.Module | None = None


class Family(ABC):
    """models: for messages."""

    models: ClassVar[str]

    @abstractmethod
    def recognises(self, model: nn.Module) -> bool:
        """Whether a whole model is of this family."""

    @abstractmethod
    def find(self, model: nn.Module) -> Iterator[Modules]:
        """Every self-attention over image tokens."""

    def check(self, model: nn.Module) -> None:  # noqa: B027 most have nothing to check
        """UnsupportedModelError for variants that cannot be reduced."""

    @abstractmethod
    def axes(self, model: nn.Module, argument: Argument) -> Axes | None:
        """Of the input: what `axes_at` needs to know."""

    def axes_at(self, axes: Axes | None, site: Site, n_tokens: int) -> Axes | None:
        """The grid of the tokens of a site: (rows, columns) or (frames, rows, columns)."""
        return require_product(axes, n_tokens, site)

    def places(self, model: nn.Module, argument: Argument) -> Any:
        """What rotary positions are computed from, where attention does not get it."""
        return None

    def own_axes(self, model: nn.Module) -> Axes | None:
        """What `axes` would say of an input of the model's own size, where its configuration knows one."""
        side = getattr(model.config, "sample_size", None)
        if side is None:
            return None
        return (side, side) if isinstance(side, int) else tuple(side)


def named(module: Any, *names: str) -> bool:
    """Whether a module is of a class with one of these names, or of a subclass."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def blocks_of(model: nn.Module, *names: str) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if named(module, *names))


def site_of(index: int, name: str, attention: nn.Module, downsample: int = 1) -> Site:
    inner = int(attention.inner_dim)  # type: ignore[arg-type]
    to_q = attention.to_q
    width = int(getattr(to_q, "in_features", inner))  # an adapter's layer has it too
    return Site(index, name, downsample, width, inner, int(attention.heads))  # type: ignore[arg-type]


def require_product(axes: Axes | None, n_tokens: int, site: Site) -> Axes | None:
    if axes is not None and product(axes) != n_tokens:
        raise RuntimeError(
            f"{site.name} got {n_tokens} tokens, where an input of this size was expected to have "
            f"{' x '.join(map(str, axes))}: agglo does not know how this model arranges them"
        )
    return axes


def product(axes: Axes) -> int:
    product = 1
    for length in axes:
        product *= length
    return product


def all_named(own: Any, where: str, name: str) -> bool:
    """Whether the submodules named `where` are all of a class. own: a model's submodules, not those that a wrapper
    around it seems to have."""
    blocks = own.get(where)
    return isinstance(blocks, nn.ModuleList) and len(blocks) > 0 and all(named(block, name) for block in blocks)
