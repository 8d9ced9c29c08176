"""A user's images as batches: one part to search on, another that the search never sees, and one batch to time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from agglo.checks import number
from agglo.models.checkpoints import fingerprint

_SEARCH_MOST = 512  # images; more would slow the search down and hardly change it
_QUALITY_BATCH = 32  # small steps between the rounds of the search
_TIMED = 64  # images of the batch that is timed, unless batches say otherwise
_MOST_OF_BATCHES = 1000  # images that are taken of a DataLoader, the first ones


@dataclass(frozen=True)
class Batch:
    """Inputs as the model takes them, their classes (B,) or None, and how many images there are."""

    inputs: Any
    labels: Tensor | None
    images: int

    def pick(self, indices: Sequence[int]) -> Batch:
        """Return some of the images of a tensor or list."""
        chosen = list(indices)
        inputs = self.inputs[chosen] if isinstance(self.inputs, Tensor) else [self.inputs[index] for index in chosen]
        return Batch(inputs, None if self.labels is None else self.labels[chosen], len(chosen))


@dataclass(frozen=True)
class Images:
    """Batches of different images to search on and to confirm with, and a batch of the size that is timed.

    `about` holds their numbers and a fingerprint, for the report and to recognise them.
    """

    search: list[Batch]
    confirmation: list[Batch]
    timing: Batch
    about: dict[str, Any]

    @property
    def has_labels(self) -> bool:
        return all(batch.labels is not None for batch in (*self.search, *self.confirmation))


def split(
    images: Any,
    labels: Any = None,
    batch_size: int | None = None,
    *,
    tuples_are_inputs: bool = False,
    seed: int = 0,
) -> Images:
    """Put images into a random order, and half of them (at most 512) apart to search on.

    Args:
        images: (N, C, H, W); a list of images (C, H, W), which may differ in size; or batches (a DataLoader, a list,
            any iterable): tensors, (inputs, labels), dicts of the model's arguments with or without "labels", lists of
            images.
        labels: Classes (N,) of images that come without batches.
        batch_size: Images of the batch that is timed; None is 64, or the size of the batches.
        tuples_are_inputs: Whether a pair is two arguments of the model, not inputs and labels.
        seed: Decides the order.
    """
    if batch_size is not None:
        number("batch_size", batch_size, whole=True, minimum=1)
    if isinstance(images, (str, bytes)) or not isinstance(images, Iterable):
        raise ValueError(f"images={images!r} must be a tensor, a list of tensors or batches (a DataLoader)")
    if isinstance(images, Tensor) or (isinstance(images, Sequence) and images and _are_images(images)):
        return _split_images(_together(images, labels), batch_size or _TIMED, seed)
    if labels is not None:
        raise ValueError("labels= go with images in one tensor or list; batches bring their own")
    batches: list[Batch] = []
    for item in images:
        batches.append(_batch(item, tuples_are_inputs))
        if sum(batch.images for batch in batches) >= _MOST_OF_BATCHES:
            break
    if not batches:
        raise ValueError("there are no images")
    shapes = {batch.inputs.shape[1:] if isinstance(batch.inputs, Tensor) else None for batch in batches}
    if len(shapes) > 1 or None in shapes:
        return _split_batches(batches, batch_size, seed)
    inputs, found = torch.cat([batch.inputs for batch in batches]), [batch.labels for batch in batches]
    classes = None if any(each is None for each in found) else torch.cat(found)  # type: ignore[arg-type]
    return _split_images(Batch(inputs, classes, len(inputs)), batch_size or batches[0].images, seed)


def _are_images(items: Iterable[Any]) -> bool:
    return all(isinstance(item, Tensor) and item.dim() == 3 for item in items)


def _together(images: Any, labels: Any) -> Batch:
    """Return all images in one tensor, or in a list where their sizes differ."""
    if isinstance(images, Tensor) and images.dim() < 2:
        raise ValueError(f"images of shape {tuple(images.shape)} are no batch: (N, C, H, W) is accepted")
    if labels is not None:
        labels = torch.as_tensor(labels)
        if labels.shape != (len(images),) or labels.is_floating_point():
            raise ValueError(f"labels of shape {tuple(labels.shape)} for {len(images)} images: one class each")
    if not isinstance(images, Tensor) and len({image.shape for image in images}) == 1:
        images = torch.stack(list(images))
    return Batch(images, labels, len(images))


def _batch(item: Any, tuples_are_inputs: bool) -> Batch:
    inputs, labels = item, None
    if isinstance(item, Mapping):
        inputs = {name: value for name, value in item.items() if name != "labels"}
        labels = item.get("labels")
    elif isinstance(item, (tuple, list)) and len(item) == 2 and not tuples_are_inputs and _is_labels(item[1]):
        inputs, labels = item
    elif isinstance(item, list) and not _are_images(item):
        inputs = tuple(item)  # DataLoaders make lists of the tuples of a data set
    # Labels of several classes, or of a task that has no single one, are not used.
    return Batch(inputs, labels if _is_labels(labels) else None, _count(inputs))


def _is_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()


def _count(inputs: Any) -> int:
    if isinstance(inputs, list):
        return len(inputs)
    sizes = [len(tensor) for tensor in tensors_in(inputs) if tensor.dim() > 1]
    if not sizes:
        raise ValueError(
            f"a batch of {type(inputs).__name__} holds no tensor with images in it; accepted: a tensor (B, C, H, W), "
            "(inputs, labels), a dict or a tuple of the model's arguments, a list of images"
        )
    return sizes[0]


def _split_images(whole: Batch, timed: int, seed: int) -> Images:
    if whole.images < 2:
        raise ValueError(f"{whole.images} image: at least 2 are needed, one to search on and one to confirm with")
    order = list(range(whole.images))
    random.Random(seed).shuffle(order)
    half, size = min(whole.images // 2, _SEARCH_MOST), min(_QUALITY_BATCH, timed)
    search, confirmation = (
        [whole.pick(part[start : start + size]) for start in range(0, len(part), size)]
        for part in (order[:half], order[half:])
    )
    timing = whole.pick([order[position % len(order)] for position in range(timed)])
    return Images(search, confirmation, timing, _about([whole], search, confirmation, timed))


def _split_batches(batches: Sequence[Batch], batch_size: int | None, seed: int) -> Images:
    if len(batches) < 2:
        raise ValueError("one batch that cannot be cut: give at least 2, one to search on and one to confirm with")
    if batch_size is not None and batch_size != batches[0].images:
        raise ValueError(f"batch_size={batch_size}: these batches have {batches[0].images} images and cannot be cut")
    order = list(batches)
    random.Random(seed).shuffle(order)
    search = order[: len(order) // 2]
    while len(search) > 1 and sum(batch.images for batch in search) > _SEARCH_MOST:
        search.pop()
    confirmation = order[len(search) :]
    largest = max(order, key=lambda batch: batch.images)
    return Images(search, confirmation, largest, _about(batches, search, confirmation, largest.images))


def _about(
    batches: Sequence[Batch], search: Sequence[Batch], confirmation: Sequence[Batch], timed: int
) -> dict[str, Any]:
    searched, confirmed = (sum(batch.images for batch in part) for part in (search, confirmation))
    tensors = tensors_in([(batch.inputs, batch.labels) for batch in batches])
    return {
        "images": searched + confirmed,
        "search": searched,
        "confirmation": confirmed,
        "batch_size": timed,
        "fingerprint": fingerprint({str(number): tensor for number, tensor in enumerate(tensors)}),
    }


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a batch, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a batch on a device, with tensors of floating point in a dtype."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None), value)
