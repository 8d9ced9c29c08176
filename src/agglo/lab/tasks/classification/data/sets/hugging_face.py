"""Hugging Face data sets on disk: what `save_to_disk` wrote, or a folder of parquet or arrow files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.lab.data.image_files import BadImageError
from agglo.lab.tasks.classification.data import DataSet, Listing, register

_SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test")}


@dataclass(frozen=True)
class ImageColumn:
    """The image column of a table, as RGB or grey images."""

    table: Any
    title: str
    split: str

    def __len__(self) -> int:
        return len(self.table)

    def open(self, index: int) -> Any:
        try:
            image = self.table[index][self.title]
            return image if image.mode == "L" else image.convert("RGB")
        except Exception as error:  # decoders fail in many ways on bytes that are no image
            raise BadImageError(f"row {index} of split {self.split!r} holds no readable image: {error}") from None

    def name(self, index: int) -> str:
        return f"{self.split}[{index}]"

    def size(self, index: int) -> int:
        return 0  # known only after decoding

    def content(self, index: int) -> bytes:
        pixels: bytes = self.open(index).tobytes()
        return pixels


def read_hugging_face(root: Path, split: str) -> Listing:
    """List a split: the first image column, and the first column of class labels or of lists of them."""
    from datasets import ClassLabel, DatasetDict, Image

    found, name = _open(root), split
    if isinstance(found, DatasetDict):
        name = next((title for title in _SPLITS[split] if title in found), "")
        if not name:
            wanted = " or ".join(map(repr, _SPLITS[split]))
            raise ValueError(f"{str(root)!r} has splits {', '.join(map(repr, found))}; needed: {wanted}")
        found = found[name]
    elif split != "val":
        raise ValueError(f"{str(root)!r} is one table without splits: it can be evaluated on, not trained with")
    images = [title for title, kind in found.features.items() if isinstance(kind, Image)]
    labels = [title for title, kind in found.features.items() if isinstance(_element(kind), ClassLabel)]
    if not images or not labels:
        described = ", ".join(f"{title}: {type(kind).__name__}" for title, kind in found.features.items())
        raise ValueError(f"{str(root)!r} has columns {described}; needed: an Image and a ClassLabel, or a list of them")
    kind, values = found.features[labels[0]], found[labels[0]]
    multi_label = _element(kind) is not kind
    classes = list(_element(kind).names)
    for row, value in enumerate(values):
        if not multi_label and (value is None or value < 0):
            raise ValueError(f"row {row} of split {name!r} of {str(root)!r} has no label: {value!r}")
    targets = [tuple(sorted(set(value or []))) if multi_label else int(value) for value in values]
    return Listing(classes, ImageColumn(found.select_columns(images[:1]), images[0], name), targets, multi_label)


def _open(root: Path) -> Any:
    from datasets import load_dataset, load_from_disk

    try:
        is_saved = (root / "dataset_dict.json").is_file() or (root / "state.json").is_file()
        return load_from_disk(str(root)) if is_saved else load_dataset(str(root))
    except Exception as error:  # the library raises its own errors and those of each format
        raise ValueError(f"{str(root)!r} cannot be read as a Hugging Face data set: {error}") from error


def _element(kind: Any) -> Any:
    """Return the type of a list's elements; any other type itself."""
    return getattr(kind, "feature", None) or kind


register(
    DataSet(
        "hf",
        "Hugging Face, on disk: what save_to_disk wrote, or parquet files",
        read_hugging_face,
        signs=("dataset_dict.json", "state.json", "*.parquet", "data/*.parquet"),
    )
)
