"""What every data set is read into: images that can be opened one by one, and the class or classes of each."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from agglo.experiments.image_files import Images, listed, unreadable

_SAMPLED = 256


@dataclass
class Listing:
    """What a reader found in one split.

    targets: the class of each image; with multi_label a tuple of classes.
    bad: in words, what is named in the data set but missing or unusable; it is not among images and targets.
    remarks: what a person should know about the choice of images.
    """

    classes: list[str]
    images: Images
    targets: Sequence[int | tuple[int, ...]]
    multi_label: bool = False
    bad: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class ClassificationData(Dataset[tuple[Any, Any]]):
    """One split: [i] -> (transform(PIL image), target); the target is a float tensor (classes,) if multi_label.

    place: where the images are, for messages.
    skipped: what `skip_bad` left out, in words. remarks: what a person should know about the choice of images.
    """

    def __init__(
        self,
        name: str,
        listing: Listing,
        *,
        place: str,
        transform: Callable[[Any], Any] | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.name, self.classes, self.multi_label = name, listing.classes, listing.multi_label
        self.transform, self.remarks, self.skipped = transform, listing.remarks, list(listing.bad)
        self._images, self._targets = listing.images, listing.targets
        if listing.bad and not skip_bad:
            raise ValueError(f"{name}: {listed(listing.bad)}; --skip-bad goes on without")
        self._chosen: Sequence[int] = range(len(self._images))
        if skip_bad:
            self._chosen = self._readable()
        if self.skipped:
            warnings.warn(f"{name}: {len(self.skipped)} skipped: {listed(self.skipped)}", stacklevel=3)
        if not self._chosen:
            raise ValueError(f"{name}: {place} holds no images")

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[Any, int | Tensor]:
        chosen = self._chosen[index]
        image = self._images.open(chosen)
        return image if self.transform is None else self.transform(image), self._target(chosen)

    def _target(self, chosen: int) -> int | Tensor:
        target = self._targets[chosen]
        if isinstance(target, tuple):
            return torch.zeros(len(self.classes)).index_fill_(0, torch.tensor(target, dtype=torch.long), 1)
        return int(target)

    def fingerprint(self) -> str:
        """A short hash of the names, targets and sizes of all images, and of the content of some of them. To read all
        of a large data set would take longer than many evaluations."""
        found = hashlib.sha256("\n".join(self.classes).encode())
        for chosen in self._chosen:
            found.update(f"\n{self._images.name(chosen)} {self._targets[chosen]} {self._images.size(chosen)}".encode())
        for chosen in self._chosen[:: math.ceil(len(self._chosen) / _SAMPLED)]:
            found.update(self._images.content(chosen))
        return found.hexdigest()[:16]

    def _readable(self) -> list[int]:
        """The images that can be decoded. All are tried before any batch is made, so that every process leaves out the
        same ones."""
        complaints = unreadable(len(self._images), self._images.open)
        self.skipped += [text for text in complaints if text is not None]
        return [index for index, text in enumerate(complaints) if text is None]
