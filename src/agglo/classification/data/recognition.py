"""Which data set lies in a folder, by its files."""

from __future__ import annotations

from pathlib import Path

from agglo.classification.data.registry import dataset_named, dataset_names
from agglo.classification.data.sets.folder import FOLDER, class_names, split_folder


def detect(root: Path) -> str:
    """The name of the data set: the one whose signs are there.

    Without signs, class folders belong to the data set that has all their names among its own, such as ImageNet's
    WordNet ids; other class folders are the data set `folder`.
    """
    if not root.is_dir():
        raise ValueError(f"data={str(root)!r} is not a folder")
    known = [dataset_named(name) for name in dataset_names()]
    signs = {dataset.name: path for dataset in known if (path := dataset.found_in(root)) is not None}
    if len(signs) > 1:
        found = ", ".join(f"{name} ({path.name})" for name, path in signs.items())
        raise ValueError(f"{str(root)!r} looks like several data sets: {found}; --dataset says which")
    if signs:
        return next(iter(signs))
    present = set(class_names(split_folder(root, "val")))
    if not present:
        raise ValueError(f"{str(root)!r} looks like no data set that is known: no class folders, no index file")
    owners = (d.name for d in known if d.class_folders is not None and present <= set(d.class_folders()))
    return next(owners, FOLDER.name)
