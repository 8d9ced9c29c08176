"""The interface of a model library: how a model is built from a name, and which inputs it expects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from agglo.hosts.registry import unwrapped
from agglo.models.checkpoints import HEADS, Checkpoint, load_exactly
from agglo.models.inputs import Inputs
from agglo.models.zero_shot import Prompts, zero_shot

# The head, and the norm before it: what a checkpoint may lack where a model gets a new head.
ENDS = (*(f"{head}." for head in HEADS), "norm.", "fc_norm.")


@dataclass(frozen=True)
class ModelSpec:
    """A model as a person describes it.

    Attributes:
        name: As timm knows it, or with the library in front; see `agglo.models.opening`.
        checkpoint: A .safetensors file or one of torch.save that fits the model exactly; a method's weights in it are
            left out (`checkpoints.load_method`).
        pretrained: Download the published weights. Folders, models on the hub and names with a tag have theirs anyway.
        image_size: (height, width); None is the model's own. Position embeddings are resampled after loading.
        num_classes: Of the head; None is the checkpoint's, or else the model's own.
        options: Further arguments of the model, by timm's names (drop_path_rate, global_pool, ...).
        new_head: Initialise the head and final norm anew where the weights lack them or have others.
        from_scratch: Random weights, even where the name brings some.
        prompts: Make a zero-shot classifier of a model of images and texts. None is its image tower alone.
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
        from agglo.models.libraries import split_name

        library, name = split_name(self.name)
        brings_weights = library.brings_weights(name) and not self.from_scratch
        return self.checkpoint is None and not self.pretrained and not brings_weights

    def classes(self, checkpoint: Checkpoint | None) -> int | None:
        """Return the number of classes that is given, or else the checkpoint's; None is the model's own."""
        of_file = None if checkpoint is None or self.new_head else checkpoint.head_classes
        return of_file if self.num_classes is None else self.num_classes

    @property
    def takes_own_weights(self) -> bool:
        """Whether the weights are the ones published under this name."""
        return self.checkpoint is None and not self.has_random_weights


@dataclass(frozen=True)
class Known:
    """What a library does not keep in a built model: how images are prepared, and classes, where known."""

    inputs: Inputs | None = None
    class_names: tuple[str, ...] | None = None
    num_pretrained_classes: int | None = None


class Library(ABC):
    """A library of models, known by the prefix of their names and the Python package of their classes."""

    prefix: ClassVar[str]
    package: ClassVar[str]

    @abstractmethod
    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        """Build the model of a name without its prefix, with weights; ValueError for what does not fit."""

    def brings_weights(self, name: str) -> bool:
        """Return whether the name stands for weights too: a folder, a model on the hub, or one with a tag."""
        return ":" in name

    @abstractmethod
    def inputs(self, model: Any) -> Inputs:
        """Return how images are prepared for one of the library's models, by its own configuration."""

    def class_names(self, model: Any) -> list[str] | None:
        """Return the names of a model's classes; None where its library does not say."""
        return None

    @staticmethod
    def refuse_options(options: Mapping[str, Any], owner: str) -> None:
        """Raise ValueError for options that models of a library or a config do not have, unless they are off."""
        for name, value in options.items():
            if value:
                raise ValueError(f"{name}={value!r}: {owner} has no such option; 0 or none leaves it out")

    @staticmethod
    def require_size(spec: ModelSpec, inputs: Inputs) -> None:
        """Raise ValueError for another image size than the one of a model whose library cannot resample positions."""
        if spec.image_size not in (None, inputs.image_size):
            own = f"{spec.name} takes {inputs.image_size}"
            raise ValueError(f"image_size={spec.image_size}: {own}; models of timm and open_clip take others")


def known_of(model: Any) -> Known:
    """Return what `remember` noted; nothing is known of other models."""
    return getattr(model, "agglo_known", Known())


def remember(model: Any, known: Known) -> Any:
    """Keep what is known of a model as its attribute, which copies take along; return the model."""
    model.agglo_known = known
    return model


def with_prompts(
    model: nn.Module, tokenizer: Any, spec: ModelSpec, state: Mapping[str, Tensor] | None, inputs: Inputs
) -> nn.Module:
    """Make the zero-shot classifier of a spec, with the weights of its file if there are any."""
    assert spec.prompts is not None and spec.prompts.class_names is not None
    if state is not None:
        load_exactly(model, state, str(spec.checkpoint))
    found = zero_shot(model, tokenizer, spec.prompts.class_names, spec.prompts.templates)
    return remember(found, Known(inputs, spec.prompts.class_names))


def load(model: nn.Module, state: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Load the weights of a spec's file, which must fit exactly except for a new head.

    With one, the model's own head and final norm stay where the file lacks them or has others: MAE's encoder has none,
    another number of classes another shape, another pooling another name.
    """
    if spec.new_head:
        own = model.state_dict()
        ends = {name: value for name, value in own.items() if name.startswith(ENDS)}
        fitting = {name for name, value in ends.items() if name in state and state[name].shape == value.shape}
        body = {name: value for name, value in state.items() if name in fitting or not name.startswith(ENDS)}
        state = {**ends, **body}
    load_exactly(model, state, str(spec.checkpoint))


def head_name(model: nn.Module) -> str | None:
    """Return the name of the linear head; None if there is none under a usual name."""
    modules = dict(model.named_modules())
    return next((name for name in HEADS if isinstance(modules.get(name), nn.Linear)), None)


def class_count(model: Any) -> int:
    """Return the number of a model's classes; 0 for one without a head."""
    model = unwrapped(model)
    own = getattr(model, "num_classes", None)
    if isinstance(own, int):
        return own
    if hasattr(model, "config"):
        is_classifier = any("ForImageClassification" in cls.__name__ for cls in type(model).__mro__)  # of transformers
        return int(model.config.num_labels) if is_classifier else 0
    name = head_name(model)
    return 0 if name is None else int(model.get_submodule(name).out_features)


def set_classes(model: Any, classes: int) -> None:
    if hasattr(model, "reset_classifier"):
        model.reset_classifier(classes)
        return
    name = head_name(model)
    if name is None:
        raise ValueError(f"{type(model).__name__} has no head under a usual name ({', '.join(HEADS)}) to be replaced")
    parent, _, last = name.rpartition(".")
    old: Any = model.get_submodule(name)
    new = nn.Linear(old.in_features, classes, bias=old.bias is not None).to(old.weight.device, old.weight.dtype)
    nn.init.trunc_normal_(new.weight, std=0.02)
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    setattr(model.get_submodule(parent), last, new)
    if isinstance(getattr(model, "num_classes", None), int):
        model.num_classes = classes
    if hasattr(model, "config"):
        model.config.num_labels = classes
        model.num_labels = classes
