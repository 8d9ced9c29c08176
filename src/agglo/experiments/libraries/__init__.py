"""The libraries of models, one file each, and which of them a name or a model belongs to."""

from __future__ import annotations

from typing import Any

from agglo.experiments.inputs import Inputs
from agglo.experiments.libraries.base import Library, known_of
from agglo.experiments.libraries.heads import class_count
from agglo.experiments.libraries.open_clip import OpenClip
from agglo.experiments.libraries.timm import OWN_SPELLINGS, Timm
from agglo.experiments.libraries.torchvision import Torchvision
from agglo.experiments.libraries.transformers import Transformers
from agglo.experiments.zero_shot import ZeroShot
from agglo.hosts.registry import unwrapped

TIMM = Timm()
LIBRARIES: tuple[Library, ...] = (TIMM, Transformers(), Torchvision(), OpenClip())


def split_name(name: str) -> tuple[Library, str]:
    """The library of a name, and the name as that library knows it. A name without a prefix is timm's.

    >>> library, rest = split_name("torchvision:vit_b_16")
    >>> library.package, rest, split_name("hf-hub:timm/x")[1]
    ('torchvision', 'vit_b_16', 'hf-hub:timm/x')
    """
    for library in LIBRARIES:
        for prefix in library.prefixes:
            if name.startswith(prefix):
                return library, name if prefix in OWN_SPELLINGS else name.removeprefix(prefix)
    return TIMM, name


def brings_weights(name: str) -> bool:
    """Whether a name stands for weights too: a folder, a model on the hub, or one with a tag."""
    library, rest = split_name(name)
    return library.brings_weights(rest)


def library_of(model: Any) -> Library | None:
    """The library whose class a model is, or inherits from; None for anything else."""
    packages = {cls.__module__.split(".")[0] for cls in type(unwrapped(model)).__mro__}
    return next((library for library in LIBRARIES if library.package in packages), None)


def own_inputs(model: Any) -> Inputs:
    """What a model wants to see, by its library's own configuration."""
    model = unwrapped(model)
    known = known_of(model)
    if known is None and isinstance(model, ZeroShot):
        model = model.model
    library = library_of(model)
    if known is not None:
        return known.inputs
    if library is None:
        raise ValueError(
            f"how pictures are prepared for {type(model).__name__} is not known: give batches that are prepared already"
        )
    return library.inputs(model)


def class_names(model: Any) -> list[str] | None:
    """What a model's answers are called, by number where nobody says; None for a model without a head."""
    model = unwrapped(model)
    known, library, classes = known_of(model), library_of(model), class_count(model)
    if not classes:
        return None
    names = list(known.class_names) if known is not None and known.class_names is not None else None
    if names is None and library is not None:
        names = library.class_names(model)
    return names if names is not None and len(names) == classes else [f"class {number}" for number in range(classes)]
