"""Scenes made from Fashion-MNIST: several garments of various sizes on a textured ground, with exact masks.

    data = make_scenes(Path("fashion-mnist"), count=1000, seed=0, split="val")
    image, target = data[0]

A detector has to look at the whole of a thing: the ground carries scraps cut out of garments, with their very texture,
which are nothing, and garments may lie over each other. Masks are of what is visible: a pixel belongs to the garment on
top. Scene i depends on the seed, the split and i alone, so that the first 100 of 1000 scenes are the 100 of 100.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agglo.detection.data.base import DetectionData, Target, target_of
from agglo.detection.data.masks import Mask, encoded
from agglo.experiments.fashion_mnist import CLASSES, read_split
from agglo.experiments.randomness import derived_seed

Grey = NDArray[np.float32]
Inside = NDArray[np.bool_]

GARMENTS = (2, 7)  # asked for per scene, at least and at most; where no place is left there are fewer
SIDES = (0.18, 0.52)  # of a garment, as fractions of the scene's side
SCRAPS = (5, 11)
_TRIES = 12  # places tried for one garment
_VISIBLE = 0.4  # fraction of every garment that stays visible
_LEAST = 16  # pixels of cloth that make a garment
_CLOTH = 12  # pixels of Fashion-MNIST above it are cloth; below it is the rim that resizing left
_OCTAVES = ((3, 34.0), (6, 24.0), (14, 16.0), (38, 10.0))  # cells across the ground, and their contrast
_PIXEL_NOISE = 5.0
_PAD = 2  # pixels around a garment, so that a filter finds black beside it


def make_scenes(data: Path, count: int, seed: int = 0, split: str = "train", size: int = 112) -> Scenes:
    """Scenes from the garments of a split.

    data: the folder of the idx files. split: "train" or "val". size: the side of a scene in pixels.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split={split!r} is not known; accepted: 'train', 'val'")
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    if size < 32:
        raise ValueError(f"size={size} must be at least 32 pixels: garments would be specks")
    images, labels = read_split(data, split)
    return Scenes(images, labels, count, seed=seed, split=split, size=size)


@dataclass(frozen=True)
class Scene:
    """pixels: (size, size) grey. masks: (n, size, size) of what is visible of each garment. labels: its class."""

    pixels: NDArray[np.uint8]
    masks: Mask
    labels: list[int]


class Scenes(DetectionData):
    """Scenes, made when they are asked for. garments: (N, 28, 28) grey on black; labels: (N,)."""

    def __init__(
        self, garments: NDArray[np.uint8], labels: NDArray[np.uint8], count: int, *, seed: int, split: str, size: int
    ) -> None:
        place = f"{count} scenes of {size}x{size}, seed {seed}, split {split!r}"
        super().__init__("scenes", place=place, classes=CLASSES, category_ids=range(1, len(CLASSES) + 1))
        self.image_ids = list(range(1, count + 1))
        usable = (garments > _CLOTH).sum((1, 2)) >= _LEAST
        if not usable.any():
            raise ValueError(f"none of {len(garments)} garments has {_LEAST} pixels above {_CLOTH}")
        if (black := int((~usable).sum())) > 0:
            self.remarks.append(f"{black} of {len(garments)} garments are black and left out")
        self._garments, self._labels = garments[usable], labels[usable]
        self._seed, self._split, self._size = seed, split, size

    def scene(self, index: int) -> Scene:
        """The garments and pixels of one scene."""
        draws = np.random.default_rng(derived_seed(self._seed, "scene", self._split, self._size, index))
        pixels = _ground(draws, self._size)
        for _ in range(draws.integers(*SCRAPS)):
            piece, inside = _scrap(*self._garment(draws)[:2], draws)
            _paint(pixels, piece, inside, _anywhere(draws, piece.shape, self._size))
        owner = np.full((self._size, self._size), -1)
        areas: list[int] = []
        labels: list[int] = []
        for _ in range(draws.integers(GARMENTS[0], GARMENTS[1] + 1)):
            piece, inside, label = self._garment(draws)
            for _ in range(_TRIES):
                corner = _anywhere(draws, piece.shape, self._size)
                if _leaves_enough(owner, areas, inside, corner):
                    _paint(pixels, piece, inside, corner)
                    _window(owner, corner, inside.shape)[inside] = len(labels)
                    areas.append(int(inside.sum()))
                    labels.append(label)
                    break
        pixels += draws.normal(0, _PIXEL_NOISE, pixels.shape).astype(np.float32)
        masks = (owner == np.arange(len(labels))[:, None, None]).astype(np.uint8)
        return Scene(pixels.clip(0, 255).round().astype(np.uint8), masks, labels)

    def _garment(self, draws: np.random.Generator) -> tuple[Grey, Inside, int]:
        """Any garment in any size, bright or dark: its pixels, which of them are cloth, its class."""
        inside = np.zeros((1, 1), np.bool_)
        while inside.sum() < _LEAST:  # a thin sandal may not survive a small size
            number = int(draws.integers(len(self._garments)))
            garment = self._garments[number]
            if draws.random() < 0.5:
                garment = garment[:, ::-1]
            low, high = (fraction * self._size for fraction in SIDES)
            side = round(low * (high / low) ** draws.random())  # as many between 20 and 30 as between 30 and 45
            pixels, inside = _resized(garment, side)
        dark, contrast = draws.uniform(0, 70), draws.uniform(0.5, 0.85)
        return pixels * np.float32(contrast) + np.float32(dark), inside, int(self._labels[number])

    def read(self, index: int) -> tuple[Any, Target]:
        from PIL import Image

        scene, size = self.scene(index), (self._size, self._size)
        image = Image.fromarray(scene.pixels).convert("RGB")
        if not self.annotated:
            return image, {"image_id": self.image_ids[index], "original_size": size}
        boxes = [_box(mask) for mask in scene.masks]
        return image, target_of(boxes, scene.labels, scene.masks, self.image_ids[index], size)

    @cached_property
    def _annotations(self) -> list[dict[str, Any]]:
        return [{"id": number, **entry} for number, entry in enumerate(self._entries(), start=1)]

    def _entries(self) -> Iterator[dict[str, Any]]:
        for index, image_id in enumerate(self.image_ids):
            scene = self.scene(index)
            for mask, label, rle in zip(scene.masks, scene.labels, encoded(scene.masks), strict=True):
                left, top, right, bottom = _box(mask)
                yield {
                    "image_id": image_id,
                    "category_id": self.category_ids[label],
                    "bbox": [left, top, right - left, bottom - top],
                    "area": float(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": rle,
                }

    @property
    def ground_truth(self) -> dict[str, Any]:
        images = [{"id": image_id, "height": self._size, "width": self._size} for image_id in self.image_ids]
        names = zip(self.category_ids, self.classes, strict=True)
        categories = [{"id": number, "name": name} for number, name in names]
        return {"images": images, "annotations": self._annotations, "categories": categories}

    def fingerprint(self) -> str:
        found = hashlib.sha256(f"{self.place}\n{self._labels.tobytes().hex()}".encode())
        found.update(self._garments.tobytes())
        for index in range(min(len(self), 8)):  # what is made of them, should the making change
            found.update(self.scene(index).pixels.tobytes())
        return found.hexdigest()[:16]


def _box(mask: Mask) -> list[float]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)]


def _ground(draws: np.random.Generator, size: int) -> Grey:
    """Smooth noise on several scales around some grey."""
    ground = np.full((size, size), draws.uniform(60, 150), np.float32)
    for cells, contrast in _OCTAVES:
        ground += _smooth(draws.uniform(-contrast, contrast, (cells, cells)), ground.shape)
    return ground


def _resized(garment: NDArray[np.uint8], side: int) -> tuple[Grey, Inside]:
    """A garment in another size, without the black around it, and which pixels are cloth."""
    from PIL import Image, ImageFilter

    padded = Image.fromarray(np.pad(garment, _PAD))
    # Gaps of a pixel or two inside a garment are folds and prints, not holes.
    cloth = padded.point(lambda value: 255 * (value > _CLOTH))
    cloth = cloth.filter(ImageFilter.MaxFilter(3)).filter(ImageFilter.MinFilter(3))
    # Pixels at the rim are half black. They would draw a dark line around everything: a border that gives it away.
    rim = np.asarray(cloth) > np.asarray(cloth.filter(ImageFilter.MinFilter(3)))
    grey = np.where(rim, np.asarray(padded.filter(ImageFilter.MaxFilter(3))), np.asarray(padded)).astype(np.float32)
    share = np.asarray(cloth, np.float32) / 255
    side = round(side * padded.size[0] / len(garment))
    weight, weighted = (
        np.asarray(Image.fromarray(values).resize((side, side), Image.Resampling.BILINEAR))
        for values in (share, grey * share)
    )
    inside = weight >= 0.5
    if not inside.any():
        return weight, inside
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    tight = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    return (weighted / np.maximum(weight, 0.5))[tight], inside[tight]


def _scrap(pixels: Grey, inside: Inside, draws: np.random.Generator) -> tuple[Grey, Inside]:
    """A piece of a garment, a third to a half as long, with an uneven edge: its texture without its shape."""
    height, width = (max(3, round(side * draws.uniform(0.35, 0.55))) for side in pixels.shape)
    top, left = (
        int(draws.integers(max(1, side - part + 1))) for side, part in zip(pixels.shape, (height, width), strict=True)
    )
    piece, cloth = pixels[top : top + height, left : left + width], inside[top : top + height, left : left + width]
    rows, columns = (np.linspace(-1, 1, side)[:, None] for side in piece.shape)
    edge = _smooth(draws.uniform(0.3, 1.7, (4, 4)), piece.shape)
    return piece, cloth & (rows**2 + columns.T**2 <= edge)


def _smooth(values: NDArray[Any], shape: tuple[int, ...]) -> Grey:
    """A few values spread over an array, smoothly."""
    from PIL import Image

    large = Image.fromarray(values.astype(np.float32)).resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
    return np.asarray(large)


def _anywhere(draws: np.random.Generator, shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """A corner from which a piece lies wholly inside the scene."""
    return int(draws.integers(size - shape[0] + 1)), int(draws.integers(size - shape[1] + 1))


def _window(array: NDArray[Any], corner: tuple[int, int], shape: tuple[int, ...]) -> NDArray[Any]:
    return array[corner[0] : corner[0] + shape[0], corner[1] : corner[1] + shape[1]]


def _paint(pixels: Grey, piece: Grey, inside: Inside, corner: tuple[int, int]) -> None:
    _window(pixels, corner, piece.shape)[inside] = piece[inside]


def _leaves_enough(owner: NDArray[Any], areas: list[int], inside: Inside, corner: tuple[int, int]) -> bool:
    """Whether enough of every garment so far would stay visible. owner: the garment on top at each pixel, or -1."""
    left = owner.copy()
    _window(left, corner, inside.shape)[inside] = -1
    visible = np.bincount(left[left >= 0], minlength=len(areas))
    return bool((visible >= _VISIBLE * np.asarray(areas)).all())
