"""What the classes of a data set are called in a prompt."""

from __future__ import annotations

from dataclasses import replace

from agglo.classification.data import ClassificationData
from agglo.experiments.imagenet import imagenet_names
from agglo.experiments.models import ModelSpec


def prompted(spec: ModelSpec, data: ClassificationData) -> ModelSpec:
    """The spec with class names in its prompts: those that were given, or else the data set's. Unchanged where it has
    no prompts."""
    if spec.prompts is None:
        return spec
    names = spec.prompts.class_names
    if names is None:
        names = tuple(class_words(data))
    if len(names) != len(data.classes):
        raise ValueError(f"{len(names)} class names for the {len(data.classes)} classes of {data.name}: one each")
    return replace(spec, prompts=replace(spec.prompts, class_names=names))


def class_words(data: ClassificationData) -> list[str]:
    """The classes in words: ImageNet's by name where the data has WordNet ids, others as the data calls them, without
    the underscores of folder names."""
    if data.name == "imagenet":
        return imagenet_names()
    return [" ".join(name.replace("_", " ").split()) for name in data.classes]
