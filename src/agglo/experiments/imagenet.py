"""The 1000 classes of ImageNet-1K in words."""

from __future__ import annotations

from importlib.resources import files


def imagenet_names() -> list[str]:
    """In the order of the labels, as the paper prompts them: all synonyms of each, the two cranes told apart."""
    text = files("agglo.experiments").joinpath("imagenet_names.txt").read_text(encoding="utf-8")
    return text.splitlines()
