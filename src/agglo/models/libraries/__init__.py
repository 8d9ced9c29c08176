"""The model libraries, one file each, and which of them a name or a model belongs to."""

from __future__ import annotations

from typing import Any

from agglo.hosts.registry import unwrapped
from agglo.models.inputs import Inputs
from agglo.models.libraries.base import Library, class_count, known_of
from agglo.models.libraries.open_clip import OpenClip
from agglo.models.libraries.timm import Timm
from agglo.models.libraries.torchvision import Torchvision
from agglo.models.libraries.transformers import Transformers
from agglo.models.zero_shot import ZeroShot

TIMM = Timm()
LIBRARIES: tuple[Library, ...] = (TIMM, Transformers(), Torchvision(), OpenClip())


def split_name(name: str) -> tuple[Library, str]:
    """Return the library of a name, and the name as that library knows it. A name without a prefix is timm's.

    >>> library, rest = split_name("torchvision:vit_b_16")
    >>> library.package, rest, split_name("hf-hub:timm/x")[1]
    ('torchvision', 'vit_b_16', 'hf-hub:timm/x')
    """
    library = next((library for library in LIBRARIES if library.prefix and name.startswith(library.prefix)), TIMM)
    return library, name.removeprefix(library.prefix)


def library_of(model: Any) -> Library | None:
    """Return the library whose class a model is or inherits from, or None."""
    packages = {cls.__module__.split(".")[0] for cls in type(unwrapped(model)).__mro__}
    return next((library for library in LIBRARIES if library.package in packages), None)


def own_inputs(model: Any) -> Inputs:
    """Return how images are prepared for a model, by its library's own configuration."""
    model = unwrapped(model)
    if (known := known_of(model).inputs) is not None:
        return known
    if isinstance(model, ZeroShot):
        return own_inputs(model.model)
    if (library := library_of(model)) is None:
        raise ValueError(
            f"how images are prepared for {type(model).__name__} is not known: give batches that are prepared already"
        )
    return library.inputs(model)


def class_names(model: Any) -> list[str] | None:
    """Return the names of a model's classes, numbered where unknown; None for a model without a head."""
    model = unwrapped(model)
    library, classes = library_of(model), class_count(model)
    if not classes:
        return None
    names = list(known_of(model).class_names or (library and library.class_names(model)) or ())
    return names if len(names) == classes else [f"class {number}" for number in range(classes)]
