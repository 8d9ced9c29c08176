"""NUS-WIDE from nus_wid_data.csv: columns file path, label (a Python list of names, as text) and split name."""

from __future__ import annotations

import ast
import csv
from pathlib import Path

from agglo.lab.data.image_files import require_file
from agglo.lab.tasks.classification.data import SEVERAL_LABELS, DataSet, Listing, present_files, register

_FILE = "nus_wid_data.csv"


def read_nuswide(root: Path, split: str) -> Listing:
    """List a split; classes are all names in either split, sorted."""
    rows = _rows(require_file(root / _FILE))
    classes = sorted({name for _, names, _ in rows for name in names})
    indices = {name: index for index, name in enumerate(classes)}
    chosen = [(path, names) for path, names, its_split in rows if its_split == split]
    entries = ((path, tuple(sorted({indices[name] for name in names}))) for path, names in chosen)
    files, targets, bad = present_files(root, entries, _FILE)
    return Listing(classes, files, targets, True, bad)


def _rows(path: Path) -> list[tuple[str, list[str], str]]:
    """Return the path, the names of the classes and the split of each image."""
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            header = [title.strip().lower().replace("_", "").replace(" ", "") for title in next(reader)]
            columns = [header.index(title) for title in ("filepath", "label", "splitname")]
            for row in filter(None, reader):
                image, label, split = (row[column].strip() for column in columns)
                names = ast.literal_eval(label)
                if not isinstance(names, list):
                    raise ValueError(f"{label!r} is no list of labels")
                rows.append((image, names, split))
        except Exception as error:  # the csv module, literal_eval and wrong columns fail in many ways
            raise ValueError(
                f"{str(path)!r} line {reader.line_num}: {error}; needed: file path, list of labels, split name"
            ) from error
    return rows


register(
    DataSet(
        "nuswide",
        f"NUS-WIDE: {_FILE} and the images it names; several labels per image",
        read_nuswide,
        signs=(_FILE,),
        squash=True,
        augmentation=SEVERAL_LABELS,
    )
)
