"""The data sets there are, by name: those of the folder `sets`, and those that other packages bring."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from agglo.classification.data.augmentation import Augmentation
from agglo.classification.data.base import Listing

ENTRY_POINTS = "agglo.datasets"
_FOLDER = "agglo.classification.data.sets"


@dataclass(frozen=True)
class DataSet:
    """Everything agglo knows about a data set.

    name: what a person types.
    about: what lies in its folder, in a few words, for help pages.
    read: (folder, "train" or "val") -> what is in that split.
    signs: glob patterns of files that only this data set has; one match in a folder is enough to recognise it.
    class_folders: for data sets of one folder per class, the names that these folders may have.
    crop: fraction of the resized picture's side that is left when evaluating.
    squash: resize to the image size itself when evaluating and training, whatever the proportions; crop nothing.
    augmentation: what training does to the pictures, unless a recipe says otherwise.
    """

    name: str
    about: str
    read: Callable[[Path, str], Listing]
    signs: tuple[str, ...] = ()
    class_folders: Callable[[], Collection[str]] | None = None
    crop: float = 0.875
    squash: bool = False
    augmentation: Augmentation = field(default_factory=Augmentation)

    def found_in(self, root: Path) -> Path | None:
        """The first file in a folder that is a sign of this data set, if there is one."""
        return next((path for pattern in self.signs for path in sorted(root.glob(pattern))), None)


_KNOWN: dict[str, DataSet] = {}


def register(dataset: DataSet) -> DataSet:
    """Make a data set known by its name. The same name again replaces it only if it comes from the same module, as when
    a notebook's cell runs twice."""
    known = _KNOWN.get(dataset.name)
    if known is not None and known.read.__module__ != dataset.read.__module__:
        raise ValueError(f"data set name {dataset.name!r} is taken by {known.read.__module__}")
    _KNOWN[dataset.name] = dataset
    return dataset


def dataset_named(name: str) -> DataSet:
    """A data set by its name."""
    _discover()
    if name not in _KNOWN:
        raise ValueError(f"dataset={name!r} is not known; accepted: {', '.join(map(repr, dataset_names()))}")
    return _KNOWN[name]


def dataset_names() -> list[str]:
    """The names of all data sets, sorted."""
    _discover()
    return sorted(_KNOWN)


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(import_module(_FOLDER).__path__, f"{_FOLDER}."):
        import_module(module.name)
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
            if isinstance(found, DataSet):
                register(found)
        # Whatever is wrong with another package, the data sets of this one can be used.
        except Exception as error:
            warnings.warn(f"data set {entry.name!r} ({entry.value}) cannot be used: {error}", stacklevel=2)
