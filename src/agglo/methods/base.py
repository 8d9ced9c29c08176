"""What a method sees and what it answers: the one interface of every token-reduction method.

A method is asked once per reducing block. It answers with a `Grouping` of the tokens it was shown, wrapped in an
`Outcome` that may also carry tokens mixed in a way of its own and an extra loss. Methods without parameters are plain
objects; methods with parameters inherit from `torch.nn.Module` as well and are registered under the model they are
applied to, so that optimisers and checkpoints see them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from agglo.grouping import Grouping


@dataclass(frozen=True)
class View:
    """The tokens of a batch at one block, prefix tokens first, as a method sees them.

    tokens: (B, T, C), after the block's attention (before the block for methods that act there).
    keys, values: (B, H, T, d) of the block's attention, keys before any rotation; None before the block.
    class_attention: (B, H, T), how the first token attends; None unless the method needs it.
    sizes: (B, T), patches each token stands for, 0 for padding; None where every token is one patch.
    counts: (B,), patch tokens of each image that are no padding; None where nothing is padded.
    prefix: tokens at the front that must stay as they are.
    target: patch tokens to leave; None where a threshold decides.
    threshold: merge while groups are at most this far apart; None where a target decides.
    stage: how many reductions came before this one.
    training: whether the model trains.
    """

    tokens: Tensor
    keys: Tensor | None
    values: Tensor | None
    class_attention: Tensor | None
    sizes: Tensor | None
    counts: Tensor | None
    prefix: int
    target: int | None
    threshold: float | None
    stage: int
    training: bool


@dataclass(frozen=True)
class Outcome:
    """What a method decided.

    grouping: of the tokens in the view; for soft methods each token's strongest group.
    tokens: (B, G, C), where the new tokens are not the size-weighted means of their groups.
    loss: a scalar to add to the training loss; collected by `agglo.trace`.
    """

    grouping: Grouping
    tokens: Tensor | None = None
    loss: Tensor | None = None


class Method(ABC):
    """A token-reduction method. Options are the keyword arguments of its constructor."""

    name: ClassVar[str]
    acts: ClassVar[Literal["after attention", "before block"]] = "after attention"
    needs_class_attention: ClassVar[bool] = False
    takes_threshold: ClassVar[bool] = False

    def reachable(self, n_tokens: int, target: int) -> int:
        """How many of n_tokens patch tokens are really left when target are asked for; ValueError if out of reach."""
        return target

    @abstractmethod
    def reduce(self, view: View) -> Outcome:
        """Decide what becomes of the tokens."""

    def options(self) -> dict[str, Any]:
        """What distinguishes this instance, for reports."""
        return {}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options().items())})"
