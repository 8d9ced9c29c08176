"""Scenes made from Fashion-MNIST: several garments of various sizes on a textured ground, with exact masks.

    data = make_scenes(Path("fashion-mnist"), count=1000, seed=0, split="val")
    image, target = data[0]

A detector has to look at whole objects: the ground carries scraps cut out of garments, with their very texture, which
are background, and garments may occlude each other. Masks are of what is visible: a pixel belongs to the garment on
top. Scene i depends on the seed, the split and i alone, so that the first 100 of 1000 scenes are the 100 of 100.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from agglo.checks import choice
from agglo.lab.data.fashion_mnist import CLASSES, read_split
from agglo.lab.tasks.detection.data.base import DetectionData, Mask, Target, box_and_area, encode, target_of
from agglo.utils.randomness import derived_seed

Grey = NDArray[np.float32]
Inside = NDArray[np.bool_]

GARMENTS = (2, 7)  # asked for per scene, at least and at most; where no room is left there are fewer
SIDES = (0.18, 0.52)  # of a garment, as fractions of the scene's side
SCRAPS = (5, 11)
_TRIES = 12  # positions tried for one garment
_VISIBLE = 0.4  # fraction of every garment that stays visible
_LEAST = 16  # pixels of cloth that make a garment
_CLOTH = 12  # pixels of Fashion-MNIST above it are cloth; below it is the rim that resizing left
_OCTAVES = ((3, 34.0), (6, 24.0), (14, 16.0), (38, 10.0))  # cells across the ground, and their contrast
_PIXEL_NOISE = 5.0
_PAD = 2  # pixels around a garment, so that a filter finds black beside it


def make_scenes(data: Path, count: int, seed: int = 0, split: str = "train", size: int = 112) -> Scenes:
    """Make `count` scenes of `size` x `size` pixels from the garments of a split, "train" or "val", of idx files."""
    choice("split", split, ("train", "val"))
    if count < 1 or size < 32:  # garments would be specks
        raise ValueError(f"count={count} must be at least 1 and size={size} at least 32 pixels")
    return Scenes(*read_split(data, split), count, seed=seed, split=split, size=size)


class Scene(NamedTuple):
    """Grey pixels (size, size), masks (n, size, size) of what is visible of each garment, and their labels."""

    pixels: NDArray[np.uint8]
    masks: Mask
    labels: list[int]


class Scenes(DetectionData):
    """Scenes of garments (N, 28, 28), grey on black, with labels (N,); each is made when it is asked for."""

    def __init__(
        self, garments: NDArray[np.uint8], labels: NDArray[np.uint8], count: int, *, seed: int, split: str, size: int
    ) -> None:
        description = f"{count} scenes of {size}x{size}, seed {seed}, split {split!r}"
        super().__init__("scenes", description, CLASSES, range(1, len(CLASSES) + 1))
        self.image_ids = range(1, count + 1)
        usable = (garments > _CLOTH).sum((1, 2)) >= _LEAST
        self._garments, self._labels = garments[usable], labels[usable]
        self._seed, self._split, self._size = seed, split, size

    def scene(self, index: int) -> Scene:
        """Make one scene."""
        draws = np.random.default_rng(derived_seed(self._seed, "scene", self._split, self._size, index))
        pixels = np.full((self._size, self._size), draws.uniform(60, 150), np.float32)
        for cells, contrast in _OCTAVES:  # smooth noise on several scales around some grey
            pixels += _smooth(draws.uniform(-contrast, contrast, (cells, cells)), pixels.shape)
        for _ in range(draws.integers(*SCRAPS)):
            piece, inside = _scrap(*self._garment(draws)[:2], draws)
            pixels[_anywhere(draws, piece.shape, self._size)][inside] = piece[inside]
        owner = np.full((self._size, self._size), -1)  # the garment on top at each pixel
        areas: list[int] = []
        labels: list[int] = []
        for _ in range(draws.integers(GARMENTS[0], GARMENTS[1] + 1)):
            piece, inside, label = self._garment(draws)
            for _ in range(_TRIES):
                window = _anywhere(draws, piece.shape, self._size)
                covered = owner.copy()
                covered[window][inside] = len(labels)
                visible = np.bincount(covered[covered >= 0], minlength=len(areas))[: len(areas)]
                if (visible >= _VISIBLE * np.asarray(areas)).all():
                    pixels[window][inside] = piece[inside]
                    owner = covered
                    areas.append(int(inside.sum()))
                    labels.append(label)
                    break
        pixels += draws.normal(0, _PIXEL_NOISE, pixels.shape).astype(np.float32)
        masks = (owner == np.arange(len(labels))[:, None, None]).astype(np.uint8)
        return Scene(pixels.clip(0, 255).round().astype(np.uint8), masks, labels)

    def _garment(self, draws: np.random.Generator) -> tuple[Grey, Inside, int]:
        """Draw a garment of any size, bright or dark: its pixels, which of them are cloth, its label."""
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
        scene, size = self.scene(index), (self._size, self._size)
        image = Image.fromarray(scene.pixels).convert("RGB")
        if not self.annotated:
            return image, {"image_id": self.image_ids[index], "original_size": size}
        boxes: Any = [Image.fromarray(mask).getbbox() for mask in scene.masks]
        return image, target_of(boxes, scene.labels, scene.masks, self.image_ids[index], size)

    @cached_property
    def ground_truth(self) -> dict[str, Any]:
        images = [{"id": image_id, "height": self._size, "width": self._size} for image_id in self.image_ids]
        categories = [{"id": id_, "name": name} for id_, name in zip(self.category_ids, self.classes, strict=True)]
        entries: list[dict[str, Any]] = []
        for index, image_id in enumerate(self.image_ids):
            scene = self.scene(index)
            for label, rle in zip(scene.labels, encode(scene.masks), strict=True):
                about = {"id": len(entries) + 1, "image_id": image_id, "category_id": self.category_ids[label]}
                about |= box_and_area(rle, self._size, self._size)
                entries.append({**about, "iscrowd": 0, "segmentation": rle})
        return {"images": images, "annotations": entries, "categories": categories}

    def fingerprint(self) -> str:
        found = hashlib.sha256(f"{self.description}\n{self._labels.tobytes().hex()}".encode())
        found.update(self._garments.tobytes())
        for index in range(min(len(self), 8)):  # what is made of them, should the making change
            found.update(self.scene(index).pixels.tobytes())
        return found.hexdigest()[:16]


def _resized(garment: NDArray[np.uint8], side: int) -> tuple[Grey, Inside]:
    """Resize a garment without the black around it; returns its pixels, and which of them are cloth."""
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
    left, top, right, bottom = Image.fromarray(inside).getbbox() or (0, 0, side, side)
    tight = slice(top, bottom), slice(left, right)
    return (weighted / np.maximum(weight, 0.5))[tight], inside[tight]


def _scrap(pixels: Grey, inside: Inside, draws: np.random.Generator) -> tuple[Grey, Inside]:
    """Cut a piece out of a garment, a third to a half as long, with an uneven edge: its texture without its shape."""
    shape = tuple(max(3, round(side * draws.uniform(0.35, 0.55))) for side in pixels.shape)
    top, left = (int(draws.integers(max(1, side - part + 1))) for side, part in zip(pixels.shape, shape, strict=True))
    window = slice(top, top + shape[0]), slice(left, left + shape[1])
    piece = pixels[window]
    rows, columns = (np.linspace(-1, 1, side)[:, None] for side in piece.shape)
    edge = _smooth(draws.uniform(0.3, 1.7, (4, 4)), piece.shape)
    return piece, inside[window] & (rows**2 + columns.T**2 <= edge)


def _smooth(values: NDArray[Any], shape: tuple[int, ...]) -> Grey:
    """Spread a few values smoothly over an array."""
    large = Image.fromarray(values.astype(np.float32)).resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
    return np.asarray(large)


def _anywhere(draws: np.random.Generator, shape: tuple[int, ...], size: int) -> tuple[slice, slice]:
    """Draw a window of that shape inside the scene."""
    top, left = (int(draws.integers(size - side + 1)) for side in shape)
    return slice(top, top + shape[0]), slice(left, left + shape[1])
