"""Hugging Face data sets on disk: what `save_to_disk` wrote, or a folder of parquet or arrow files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.lab.data.image_files import BadImageError
from agglo.lab.tasks.classification.data import DataSet, Listing, register

_SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test")}


@dataclass(frozen=True)
class Column:
    """The image column of a table as RGB or grey images, of the rows with the given numbers."""

    table: Any
    title: str
    split: str
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def open(self, index: int) -> Any:
        try:
            image = self.table[self.rows[index]][self.title]
            return image if image.mode == "L" else image.convert("RGB")
        except Exception as error:  # a decoder fails in many ways on bytes that are no image
            raise BadImageError(
                f"row {self.rows[index]} of split {self.split!r} holds no readable image: {error}"
            ) from None

    def name(self, index: int) -> str:
        return f"{self.split}[{self.rows[index]}]"

    def size(self, index: int) -> int:
        return 0

    def content(self, index: int) -> bytes:
        try:
            return self.open(index).tobytes()
        except BadImageError as error:
            return str(error).encode()


def read_hugging_face(root: Path, split: str) -> Listing:
    """List a split: the first image column, and the first column of class labels or of lists of them."""
    from datasets import ClassLabel, DatasetDict, Image

    found = _open(root)
    name = split
    if isinstance(found, DatasetDict):
        accepted = [title for title in _SPLITS[split] if title in found]
        if not accepted:
            wanted = " or ".join(map(repr, _SPLITS[split]))
            raise ValueError(f"{str(root)!r} has splits {', '.join(map(repr, found))}; needed: {wanted}")
        name = accepted[0]
        found = found[name]
    elif split != "val":
        raise ValueError(f"{str(root)!r} is one table without splits: it can be evaluated on, not trained with")
    images = [title for title, kind in found.features.items() if isinstance(kind, Image)]
    labels = {title: kind for title, kind in found.features.items() if isinstance(_element(kind), ClassLabel)}
    if not images or not labels:
        described = ", ".join(f"{title}: {type(kind).__name__}" for title, kind in found.features.items())
        raise ValueError(f"{str(root)!r} has columns {described}; needed: an Image and a ClassLabel, or a list of them")
    label, kind = next(iter(labels.items()))
    multi_label = _element(kind) is not kind
    values = found[label]
    classes = list(_element(kind).names)
    targets: list[int | tuple[int, ...]] = []
    bad: list[str] = []
    kept: list[int] = []
    for row, value in enumerate(values):
        if any(entry is None or not 0 <= entry < len(classes) for entry in (value or [] if multi_label else [value])):
            bad.append(f"row {row} of split {name!r} has label {value!r}; accepted: 0 to {len(classes) - 1}")
        else:
            targets.append(tuple(sorted(set(value or []))) if multi_label else int(value))
            kept.append(row)
    column = Column(found.select_columns([images[0]]), images[0], name, kept)
    return Listing(classes, column, targets, multi_label, bad)


def _open(root: Path) -> Any:
    from datasets import load_dataset, load_from_disk

    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        return load_from_disk(str(root))
    try:
        return load_dataset(str(root))
    except Exception as error:  # the library raises its own errors and those of each format
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{str(root)!r} cannot be read as a Hugging Face data set: {reason}") from error


def _element(kind: Any) -> Any:
    """Return the type of a list's elements; any other type itself."""
    inner = getattr(kind, "feature", None)
    return kind if inner is None else inner


register(
    DataSet(
        "hf",
        "Hugging Face, on disk: what save_to_disk wrote, or parquet files",
        read_hugging_face,
        signs=("dataset_dict.json", "state.json", "*.parquet", "data/*.parquet"),
    )
)
