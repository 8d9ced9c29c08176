"""A user's images as batches: one part to search on, another that the search never sees, and one batch to time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SEARCH_MOST = 512  # images; more would slow the search down and hardly change it
_QUALITY_BATCH = 32  # small steps between the rounds of the search
_TIMED = 64  # images of the batch that is timed, unless batches say otherwise
MOST_OF_BATCHES = 1000  # images taken of a DataLoader, unless the user says otherwise
_SAMPLED = 4096  # numbers of a tensor that its fingerprint goes by


@dataclass(frozen=True)
class Batch:
    """inputs: as the model takes them. labels: (B,) classes, or None. images: how many."""

    inputs: Any
    labels: Tensor | None
    images: int


@dataclass(frozen=True)
class Images:
    """search, confirmation: batches of different images. timing: a batch of the size that is timed.
    about: how many there are of each, in words for the report."""

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
    *,
    batch_size: int | None = None,
    n_images: int | None = None,
    tuples_are_inputs: bool = False,
    seed: int = 0,
) -> Images:
    """Images in a random order that the seed decides, half of them (at most 512) to search on.

    images: (N, C, H, W); a list of images (C, H, W), which may differ in size; or batches (a DataLoader, a list, any
        iterable): tensors, (inputs, labels), dicts of the model's arguments with or without "labels", lists of images.
    labels: of images that come without batches, (N,).
    batch_size: that is timed; None is 64, or that of the batches.
    n_images: the first so many are taken; None is all of a tensor or list, and 1000 of batches.
    tuples_are_inputs: whether a pair is two arguments of the model, not inputs and labels.
    """
    for name, value in (("batch_size", batch_size), ("n_images", n_images)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
    if _are_alone(images):
        return _split_images(_together(images, labels, n_images), batch_size or _TIMED, seed)
    if labels is not None:
        raise ValueError("labels= go with images in one tensor or list; batches bring their own")
    batches = _batches(images, n_images or MOST_OF_BATCHES, tuples_are_inputs)
    plain = all(isinstance(batch.inputs, Tensor) for batch in batches)
    if plain and len({batch.inputs.shape[1:] for batch in batches}) == 1:
        return _split_images(_joined(batches), batch_size or batches[0].images, seed)
    return _split_batches(batches, batch_size, seed)


def _are_alone(images: Any) -> bool:
    """Whether images come without batches."""
    if isinstance(images, (str, bytes)) or not isinstance(images, Iterable):
        raise ValueError(f"images={images!r} must be a tensor, a list of tensors or batches (a DataLoader)")
    if isinstance(images, Tensor):
        return True
    return isinstance(images, Sequence) and bool(images) and all(isinstance(i, Tensor) and i.dim() == 3 for i in images)


def _together(images: Any, labels: Any, n_images: int | None) -> Batch:
    """All images in one tensor, or in a list where their sizes differ."""
    if isinstance(images, Tensor) and images.dim() < 2:
        raise ValueError(f"images of shape {tuple(images.shape)} are no batch: (N, C, H, W) is accepted")
    chosen = images[:n_images] if n_images is not None else images
    count = len(chosen)
    if labels is not None:
        labels = torch.as_tensor(labels)
        if labels.shape != (len(images),) or labels.is_floating_point():
            raise ValueError(f"labels of shape {tuple(labels.shape)} for {len(images)} images: one class each")
        labels = labels[:count]
    if not isinstance(chosen, Tensor):
        same = len({image.shape for image in chosen}) == 1
        chosen = torch.stack(list(chosen)) if same else list(chosen)
    return Batch(chosen, labels, count)


def _batches(images: Iterable[Any], n_images: int, tuples_are_inputs: bool) -> list[Batch]:
    found: list[Batch] = []
    taken = 0
    for item in images:
        batch = _batch(item, tuples_are_inputs)
        found.append(batch)
        taken += batch.images
        if taken >= n_images:
            break
    if not found:
        raise ValueError("there are no images")
    return found


def _batch(item: Any, tuples_are_inputs: bool) -> Batch:
    inputs, labels = item, None
    if isinstance(item, Mapping):
        inputs = {name: value for name, value in item.items() if name != "labels"}
        labels = item.get("labels")
    elif isinstance(item, (tuple, list)) and len(item) == 2 and not tuples_are_inputs and _is_labels(item[1]):
        inputs, labels = item
    elif isinstance(item, list) and not all(isinstance(i, Tensor) and i.dim() == 3 for i in item):
        inputs = tuple(item)  # DataLoaders make lists of the tuples of a data set
    if labels is not None and not _is_labels(labels):
        labels = None  # of several classes, or of a task that has no single one
    return Batch(inputs, labels, _count(inputs))


def _is_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()


def _count(inputs: Any) -> int:
    if isinstance(inputs, Tensor):
        if inputs.dim() < 2:
            raise ValueError(f"a batch of shape {tuple(inputs.shape)}: (B, C, H, W) is accepted")
        return len(inputs)
    if isinstance(inputs, list):
        return len(inputs)
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else ()
    sizes = [len(value) for value in values if isinstance(value, Tensor) and value.dim() > 1]
    if not sizes:
        raise ValueError(
            f"a batch of {type(inputs).__name__} holds no tensor with images in it; accepted: a tensor, (inputs, "
            "labels), a dict or a tuple of the model's arguments, a list of images"
        )
    return sizes[0]


def _joined(batches: list[Batch]) -> Batch:
    """Batches of plain tensors of one shape as one."""
    labelled = all(batch.labels is not None for batch in batches)
    labels = torch.cat([batch.labels for batch in batches if batch.labels is not None]) if labelled else None
    return Batch(torch.cat([batch.inputs for batch in batches]), labels, sum(batch.images for batch in batches))


def _split_images(whole: Batch, timed: int, seed: int) -> Images:
    if whole.images < 2:
        raise ValueError(f"{whole.images} image: at least 2 are needed, one to search on and one to confirm with")
    order = list(range(whole.images))
    random.Random(seed).shuffle(order)
    half = min(whole.images // 2, _SEARCH_MOST)
    size = min(_QUALITY_BATCH, timed)
    repeated = [order[number % len(order)] for number in range(timed)]
    search, confirmation = order[:half], order[half:]
    return Images(
        [_chosen(whole, search[start : start + size]) for start in range(0, half, size)],
        [_chosen(whole, confirmation[start : start + size]) for start in range(0, len(confirmation), size)],
        _chosen(whole, repeated),
        _about(whole, half, len(confirmation), timed),
    )


def _chosen(whole: Batch, numbers: Sequence[int]) -> Batch:
    index = torch.tensor(numbers)
    if isinstance(whole.inputs, Tensor):
        inputs: Any = whole.inputs[index.to(whole.inputs.device)]
    else:
        inputs = [whole.inputs[number] for number in numbers]
    return Batch(inputs, None if whole.labels is None else whole.labels[index.to(whole.labels.device)], len(numbers))


def _split_batches(batches: list[Batch], batch_size: int | None, seed: int) -> Images:
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
    searched, confirmed = (sum(batch.images for batch in part) for part in (search, confirmation))
    largest = max(order, key=lambda batch: batch.images)
    return Images(search, confirmation, largest, _about(batches, searched, confirmed, largest.images))


def _about(content: Batch | list[Batch], search: int, confirmation: int, timed: int) -> dict[str, Any]:
    batches = [content] if isinstance(content, Batch) else content
    found = hashlib.sha256()
    for batch in batches:
        for tensor in (*tensors_in(batch.inputs), *tensors_in(batch.labels)):
            found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().reshape(-1)
            found.update(flat[:: max(1, flat.numel() // _SAMPLED)].double().cpu().numpy().tobytes())
    numbers = {"images": search + confirmation, "search": search, "confirmation": confirmation}
    return {**numbers, "batch_size": timed, "fingerprint": found.hexdigest()[:16]}


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a batch, in order."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in values for tensor in tensors_in(part)]


def moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors in a batch on a device; those of floating point in a dtype too."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, Mapping):
        return {name: moved(part, device, dtype) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(part, device, dtype) for part in value)
    return value
