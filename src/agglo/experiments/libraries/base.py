"""What every library of models says about its own: how one is built from a name, and what it wants to see."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from agglo.experiments.checkpoints import HEADS, Checkpoint
from agglo.experiments.inputs import Inputs
from agglo.experiments.zero_shot import Prompts

# Parts that a checkpoint may lack where a model gets a new head: the head itself, and the norm before it.
_ENDS = (*(f"{head}." for head in HEADS), "norm.", "fc_norm.")


@dataclass(frozen=True)
class ModelSpec:
    """A model as a person describes it.

    name: as timm knows it, or with the library in front; see `agglo.experiments.models`.
    checkpoint: a .safetensors file or one of torch.save; its names and shapes must be exactly the model's. What a
        method learned may be there too and is left out (`checkpoints.load_method`).
    pretrained: take the published weights instead (downloads them). Names of folders, of models on the hub and with a
        tag bring their weights by themselves.
    image_size: (height, width); None is the model's own. Position embeddings are resampled after loading.
    num_classes: of the head; None is the checkpoint's, or else the model's own.
    options: further arguments of the model, by timm's names (drop_path_rate, global_pool, ...).
    new_head: let the weights have another head, final norm or none at all: those start afresh.
    from_scratch: random weights, even where the name brings some.
    prompts: of a model of images and texts: what makes it a classifier. None is its image tower alone.
    """

    name: str
    checkpoint: Path | None = None
    pretrained: bool = False
    image_size: tuple[int, int] | None = None
    num_classes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    new_head: bool = False
    from_scratch: bool = False
    prompts: Prompts | None = None

    @property
    def has_random_weights(self) -> bool:
        from agglo.experiments.libraries import brings_weights

        return self.checkpoint is None and not self.pretrained and (self.from_scratch or not brings_weights(self.name))

    @property
    def takes_own_weights(self) -> bool:
        """Whether the weights are those that the library has of this name."""
        return self.checkpoint is None and not self.has_random_weights


@dataclass(frozen=True)
class Known:
    """What is known of a built model that its library does not keep in it.

    class_names: of its answers; None where nobody says. taught: how many classes its weights were published for.
    """

    inputs: Inputs
    class_names: tuple[str, ...] | None = None
    taught: int | None = None


class Library(ABC):
    """One library of models.

    prefixes: what names of its models begin with; none for timm, whose plain names need nothing in front.
    accepts: how its names are written, for messages. package: that its classes come from.
    """

    prefixes: ClassVar[tuple[str, ...]]
    accepts: ClassVar[str]
    package: ClassVar[str]

    @abstractmethod
    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        """The model of a name without its prefix, with weights; ValueError for what does not fit."""

    def brings_weights(self, name: str) -> bool:
        """Whether the name stands for weights too."""
        return False

    @abstractmethod
    def inputs(self, model: Any) -> Inputs:
        """What one of the library's models wants to see, by its own configuration."""

    def class_names(self, model: Any) -> list[str] | None:
        """What a model's answers are called; None where its library does not say."""
        known = known_of(model)
        return None if known is None or known.class_names is None else list(known.class_names)

    def taught(self, model: Any) -> int | None:
        """How many classes a model's published weights tell apart; None if that is not known."""
        known = known_of(model)
        return None if known is None else known.taught


def known_of(model: Any) -> Known | None:
    """What `remember` noted."""
    return getattr(model, "agglo_known", None)


def remember(model: Any, known: Known) -> Any:
    """Note what is known of a model in it; copies take it along. Returns the model."""
    model.agglo_known = known
    return model


def with_own_head(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict, except that the model keeps its own head and final norm where the state dict has none (MAE's
    encoder), or has them in another shape (other classes) or under another name (another pooling)."""
    own = model.state_dict()
    ends = {name for name in (*own, *state) if name.startswith(_ENDS)}
    differs = {name for name in ends if name not in own or name not in state or own[name].shape != state[name].shape}
    kept = {name: value for name, value in state.items() if name not in differs}
    return {**kept, **{name: own[name] for name in differs if name in own}}


# By option: the setting of a training run that does without.
OFF = {"drop_path_rate": "drop_path=0", "patch_drop_rate": "patch_drop_rates=[]", "global_pool": "global_pool=none"}


def loads_as_head(name: str) -> bool:
    """Whether a weight belongs to what may start afresh with a new head."""
    return name.startswith(_ENDS)


def refuse_options(library: str, options: Mapping[str, Any]) -> None:
    """ValueError for options of a model that only timm's have; those that ask for nothing pass."""
    for name, value in options.items():
        if value:
            hint = f": {OFF[name]} leaves it out" if name in OFF else ""
            raise ValueError(f"{name}={value!r} is for timm's models, and those of {library} have no such option{hint}")


def require_name(spec: ModelSpec, name: str, known: Sequence[str], problem: str, lister: str) -> None:
    """ValueError with the nearest names unless a library knows the name. problem: "is not known to timm", say.

    lister: what prints all names.
    """
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"; close to it: {', '.join(close)}" if close else f"; {lister} lists them"
        raise ValueError(f"model={spec.name!r} {problem}{hint}")


def require_tag(spec: ModelSpec, name: str, tag: str, known: Iterable[str]) -> None:
    """ValueError unless a library has weights of this tag for a model; no tag is fine."""
    if tag and tag not in known:
        raise ValueError(f"model={spec.name!r}: {name} has no weights {tag!r}; accepted: {', '.join(known) or 'none'}")


def one_size(image_size: tuple[int, int], library: str) -> int:
    """A square image size as one number."""
    if image_size[0] != image_size[1]:
        raise ValueError(f"image_size={image_size}: models of {library} take squares")
    return image_size[0]
