"""NUS-WIDE from nus_wid_data.csv: columns file path, label (a Python list of names, as text) and split name."""

from __future__ import annotations

import ast
import csv
from pathlib import Path
from typing import Any

from agglo.lab.data.image_files import require_file
from agglo.lab.tasks.classification.data import SEVERAL_LABELS, DataSet, Listing, present_files, register

_FILE = "nus_wid_data.csv"
_COLUMNS = ("filepath", "label", "splitname")
_SHOWN = 120
# What ast.literal_eval may raise for text that is no Python list, by its documentation.
_NO_PYTHON = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def read_nuswide(root: Path, split: str) -> Listing:
    """List a split; classes are all names in either split, sorted."""
    table = require_file(root / _FILE)
    with table.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            rows, bad = _rows(reader, table)
        except (csv.Error, UnicodeDecodeError) as error:
            hint = "; is a quote not closed?" if "field limit" in str(error) else ""
            raise ValueError(f"{str(table)!r} line {reader.line_num} cannot be read: {error}{hint}") from error
    classes = sorted({name for _, _, names, _ in rows for name in names})
    number = {name: index for index, name in enumerate(classes)}
    entries = (
        (f"image of {_FILE} line {line}", path, tuple(sorted({number[name] for name in names})))
        for line, path, names, of_split in rows
        if of_split == split
    )
    return Listing(classes, *present_files(root, entries, bad), True, bad)


def _rows(reader: Any, path: Path) -> tuple[list[tuple[int, str, list[str], str]], list[str]]:
    """Return (line, path, names, split) of each row, and descriptions of the rows that are not understood."""
    rows, bad = [], []
    header = [title.strip().lower().replace("_", "").replace(" ", "") for title in next(reader, [])]
    if any(column not in header for column in _COLUMNS):
        raise ValueError(f"{str(path)!r} has columns {header}; needed: file path, label, split name")
    positions = [header.index(column) for column in _COLUMNS]
    for row in reader:
        if not row:
            continue
        try:
            image, label, split = (row[position].strip() for position in positions)
            names = ast.literal_eval(label)
            understood = isinstance(names, list) and all(isinstance(name, str) for name in names)
        except (IndexError, *_NO_PYTHON):
            understood = False
        if not understood:
            shown = str(row) if len(str(row)) <= _SHOWN else f"{str(row)[:_SHOWN]}..."
            bad.append(f"{path.name} line {reader.line_num} is not a path, a list of labels and a split: {shown}")
        elif split not in ("train", "val"):
            bad.append(f"{path.name} line {reader.line_num} has split {split!r}, not 'train' or 'val'")
        else:
            rows.append((reader.line_num, image, names, split))
    return rows, bad


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
