"""A user's images as batches: one part to search on, another that the search never sees, and one batch to time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from agglo.models.checkpoints import fingerprint

_MOST_SEARCHED = 512  # images; more would slow the search down and hardly change it
_BATCH = 32  # images, or fewer: small steps between the rounds of the search
_TIMED = 64  # images of the batch that is timed, unless batches say otherwise
_MOST_OF_BATCHES = 1000  # images that are taken of a DataLoader, the first ones


@dataclass(frozen=True)
class Batch:
    """Inputs as the model takes them, their classes (B,) or None, and how many images there are."""

    inputs: Any
    labels: Tensor | None
    images: int

    def pick(self, indices: Iterable[int]) -> Batch:
        """Return some of the images of a tensor or list."""
        chosen = list(indices)
        inputs = self.inputs[chosen] if isinstance(self.inputs, Tensor) else [self.inputs[index] for index in chosen]
        return Batch(inputs, None if self.labels is None else self.labels[chosen], len(chosen))


@dataclass(frozen=True)
class TuneImages:
    """Batches to search on, others to confirm with, one to time, and the numbers and fingerprint of all images."""

    search: list[Batch]
    confirmation: list[Batch]
    timing: Batch
    about: dict[str, Any]

    @property
    def has_labels(self) -> bool:
        return all(batch.labels is not None for batch in (*self.search, *self.confirmation))


def read(
    images: Any, *, tuples_are_inputs: bool = False, most: int = _MOST_OF_BATCHES
) -> tuple[list[Batch], Batch | None]:
    """Return images as batches, and as one batch that can be cut anywhere; None if that cannot be made of them.

    Args:
        images: (N, C, H, W); a list of images (C, H, W), which may differ in size; or batches (a DataLoader, a list,
            any iterable): tensors, (inputs, labels), or dicts of the model's arguments with or without "labels".
        tuples_are_inputs: Whether a pair is two arguments of the model, not inputs and labels.
        most: Images that are taken of batches, the first ones.
    """
    if isinstance(images, (str, bytes)) or not isinstance(images, Iterable):
        raise ValueError(f"images={images!r} must be a tensor, a list of tensors or batches (a DataLoader)")
    batches: list[Batch] = []
    if isinstance(images, Tensor):
        batches.append(Batch(images, None, len(images)))
    elif _are_images(images):
        each = list(images)
        one_size = len({image.shape for image in each}) == 1
        batches.append(Batch(torch.stack(each) if one_size else each, None, len(each)))
    else:
        for item in images:
            batches.append(_batch(item, tuples_are_inputs))
            if sum(batch.images for batch in batches) >= most:
                break
    return batches, _joined(batches)


def split(images: Any, batch_size: int | None = None, *, tuples_are_inputs: bool = False, seed: int = 0) -> TuneImages:
    """Put images into a random order, and half of them (at most 512) apart to search on.

    Args:
        images, tuples_are_inputs: See `read`.
        batch_size: Images of the batch that is timed; None is 64, or the size of the batches.
        seed: Decides the order.
    """
    batches, whole = read(images, tuples_are_inputs=tuples_are_inputs)
    if batch_size is None and batches and not _are_images(images):
        batch_size = batches[0].images
    tensors = tensors_in([(batch.inputs, batch.labels) for batch in batches])
    chance = random.Random(seed)
    if whole is None:  # batches that cannot be cut
        chance.shuffle(batches)
        timing = max(batches, key=lambda batch: batch.images, default=None)
    else:
        order = list(range(whole.images))
        chance.shuffle(order)
        timing = whole.pick(islice(cycle(order), batch_size or _TIMED))
        size = min(_BATCH, timing.images, -(-whole.images // 2))
        batches = [whole.pick(order[start : start + size]) for start in range(0, len(order), size)]
    if timing is None or len(batches) < 2:
        raise ValueError("too few images: at least 2, or 2 batches, are needed, to search on and to confirm with")
    search = batches[: len(batches) // 2]
    while len(search) > 1 and sum(batch.images for batch in search) > _MOST_SEARCHED:
        search.pop()
    confirmation = batches[len(search) :]
    searched, confirmed = (sum(batch.images for batch in part) for part in (search, confirmation))
    about = {
        "images": searched + confirmed,
        "search": searched,
        "confirmation": confirmed,
        "batch_size": timing.images,
        "fingerprint": fingerprint({str(number): tensor for number, tensor in enumerate(tensors)}),
    }
    return TuneImages(search, confirmation, timing, about)


def _are_images(images: Any) -> bool:
    """Return whether this is a tensor or list of images, not one of batches."""
    if isinstance(images, Tensor):
        return True
    return isinstance(images, Sequence) and {isinstance(each, Tensor) and each.dim() == 3 for each in images} == {True}


def _joined(batches: Sequence[Batch]) -> Batch | None:
    """Return batches as one that can be cut anywhere; None if they are no tensors of one shape."""
    if len(batches) == 1 and isinstance(batches[0].inputs, (list, Tensor)):
        return batches[0]
    shapes = {batch.inputs.shape[1:] if isinstance(batch.inputs, Tensor) else None for batch in batches}
    if len(shapes) != 1 or None in shapes:
        return None
    found = [batch.labels for batch in batches]
    labels = None if any(each is None for each in found) else torch.cat(found)  # type: ignore[arg-type]
    return Batch(torch.cat([batch.inputs for batch in batches]), labels, sum(batch.images for batch in batches))


def _batch(item: Any, tuples_are_inputs: bool) -> Batch:
    inputs, labels = item, None
    if isinstance(item, Mapping):
        inputs = {name: value for name, value in item.items() if name != "labels"}
        labels = item.get("labels")
    elif isinstance(item, (tuple, list)):  # DataLoaders make lists of the tuples of a data set
        has_labels = len(item) == 2 and not tuples_are_inputs and _is_labels(item[1])
        inputs, labels = item if has_labels else (tuple(item), None)
    # Labels of several classes, or of a task that has no single one, are not used.
    classes = labels if _is_labels(labels) else None
    sizes = [len(tensor) for tensor in tensors_in(inputs) if tensor.dim() > 1]
    if not sizes or (classes is not None and len(classes) != sizes[0]):
        raise ValueError(
            "a batch must be a tensor (B, C, H, W), (inputs, labels) with one class for each image, or a dict or tuple "
            f"of the model's arguments, not {type(item).__name__} of {[tuple(each.shape) for each in tensors_in(item)]}"
        )
    return Batch(inputs, classes, sizes[0])


def _is_labels(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a batch on a device, with tensors of floating point in a dtype."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None), value)
