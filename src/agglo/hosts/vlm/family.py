"""What a file of this folder says about a family of vision-language models. Everything else is shared.

model_classes       the classes whose `get_image_features` runs tower and connector, as transformers names them
processor_classes   what prepares their prompts
pointwise           whether the connector acts on each token alone; the tower's groups may then pass it
mixin               overrides of the model, `ReducedVLM` unless more is needed
dense(model)        tokens that a picture, or tile of one, takes without reduction; None where pictures differ
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from agglo.hosts.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.vit.base import Layout
from agglo.hosts.vlm.mixin import ReducedVLM
from agglo.hosts.vlm.outlet import Shrink
from agglo.methods import Grid


class Family(ABC):
    """One family. See above."""

    model_classes: ClassVar[tuple[str, ...]]
    processor_classes: ClassVar[tuple[str, ...]]
    pointwise: ClassVar[bool] = False
    mixin: ClassVar[type[ReducedModule]] = ReducedVLM

    @abstractmethod
    def dense(self, model: Any) -> int | None:
        """Tokens that a picture, or tile of one, takes without reduction; None where pictures differ in size."""

    def patches_per_token(self, model: Any) -> int:
        """Patches of the tower that the connector makes one token of."""
        return 1

    def read_blocks(self, model: Any, depth: int) -> tuple[int, ...]:
        """Where the connector is pointwise: the blocks of the tower after which it reads tokens."""
        return (depth - 1,)

    def handed_on(self, model: Any, layout: Layout, left: int) -> int:
        """Where the connector is pointwise: tokens of a picture of which the tower leaves so many patches."""
        return layout.prefix + left

    def placeholder(self, processor: Any) -> str:
        """The text that stands in a prompt once for every token of a picture."""
        return str(processor.image_token)

    def grid(self, processor: Any, image_inputs: Mapping[str, Any], index: int) -> Grid | None:
        """(rows, columns) of the dense tokens of a processed picture, where they need not be a square."""
        return None

    def shrink(self, model: Any) -> Shrink:
        """What makes pictures smaller; UnsupportedModelError where the model takes those of one size alone."""
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no smaller pictures, so that output='smaller picture' is not for it"
        )

    def recognises(self, model: nn.Module) -> bool:
        return _is_of_transformers(model, self.model_classes)

    def fits(self, processor: Any) -> bool:
        return _is_of_transformers(processor, self.processor_classes)


def _is_of_transformers(thing: object, names: Sequence[str]) -> bool:
    """Whether its class is, or inherits from, one of transformers' of such a name."""
    return any(cls.__module__.split(".")[0] == "transformers" and cls.__name__ in names for cls in type(thing).__mro__)


def side_of(size: int | Sequence[int], patch: int | Sequence[int]) -> int:
    """Patches along the side of a tower's square picture."""
    pixels, step = (each if isinstance(each, int) else each[0] for each in (size, patch))
    return int(pixels) // int(step)
