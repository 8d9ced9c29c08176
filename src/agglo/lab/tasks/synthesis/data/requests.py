"""Requests for generated images: the name, the prompt or class, and the seed of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agglo.lab.data.fashion_mnist import CLASSES
from agglo.models.zero_shot import imagenet_names

TEMPLATE = "A high quality photograph of a {}."


@dataclass(frozen=True)
class Request:
    """An image to generate."""

    name: str  # of its file, without a suffix
    prompt: str  # or the name of the class
    label: int  # index of the prompt or class
    seed: int  # of its noise


def imagenet_requests(per_class: int = 2, *, seed: int = 0, classes: Sequence[int] | None = None) -> list[Request]:
    """Return the requests of the paper's protocol, for every class or for some."""
    return _requests([TEMPLATE.format(name) for name in imagenet_names()], per_class, seed, classes)


def prompt_requests(path: Path, per_prompt: int = 1, *, seed: int = 0) -> list[Request]:
    """Return requests for the prompts of a text file, one per line; empty lines are left out."""
    try:
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts={str(path)!r} is not text in UTF-8: {error}") from error
    if not prompts:
        raise ValueError(f"prompts={str(path)!r} holds no prompt: write one per line")
    return _requests(prompts, per_prompt, seed, None)


def fashion_requests(per_class: int, *, seed: int = 0, classes: Sequence[int] | None = None) -> list[Request]:
    """Return requests for the embedded generator's classes."""
    return _requests(CLASSES, per_class, seed, classes)


def _requests(prompts: Sequence[str], per_prompt: int, seed: int, classes: Sequence[int] | None) -> list[Request]:
    chosen = range(len(prompts)) if classes is None else list(dict.fromkeys(classes))
    if unknown := [label for label in chosen if not 0 <= label < len(prompts)]:
        raise ValueError(f"class {unknown[0]} does not exist: 0 to {len(prompts) - 1} are accepted")
    return [
        Request(f"{label}_{index}", prompts[label], label, seed + image_seed(label, index, per_prompt))
        for label in chosen
        for index in range(per_prompt)
    ]


def image_seed(label: int, index: int, per_prompt: int) -> int:
    """Return the paper's seed, the digits of class and image in a row.

    With more than ten images the latter is padded with zeros, since class 1, image 81 and class 18, image 1 would be
    the same otherwise.

    >>> image_seed(18, 1, 2), image_seed(18, 1, 100)
    (181, 1801)
    """
    digits = len(str(per_prompt - 1))
    return int(f"{label}{index:0{digits}d}")
