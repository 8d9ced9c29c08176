"""One pass of a detector over images: COCO's numbers, and how fast the detector alone was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from agglo.detection.data import DetectionData, collate
from agglo.detection.data.base import Transform
from agglo.detection.evaluation.average_precision import as_coco_results, average_precision
from agglo.experiments.evaluation.turns import timed_pass
from agglo.experiments.randomness import seed_everything

if TYPE_CHECKING:
    from accelerate import Accelerator

KINDS = {"bbox": "box", "segm": "mask"}


class Images:
    """Batches of a data set. They are the same for any number of processes, which take turns with them: padding makes
    what is found in an image depend a little on the images beside it.

    accelerator: of a run on several processes.
    """

    def __init__(
        self,
        data: DetectionData,
        transform: Transform,
        *,
        batch_size: int = 1,
        workers: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.data, self.workers = data, workers
        self._prepared = data.prepared(transform, annotated=False)
        process, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
        starts = list(enumerate(range(0, len(data), batch_size)))
        self._own = [(number, list(range(start, min(start + batch_size, len(data))))) for number, start in starts]
        self._own = self._own[process::processes]

    def __len__(self) -> int:
        """Batches of this process."""
        return len(self._own)

    def __iter__(self) -> Iterator[tuple[int, list[Tensor], list[dict[str, Any]]]]:
        """The number of each batch, its images (3, h, w), and what is known of them."""
        loader = DataLoader(
            self._prepared,
            batch_sampler=[places for _, places in self._own],
            num_workers=self.workers,
            collate_fn=collate,
        )
        for (number, _), (images, targets) in zip(self._own, loader, strict=True):
            yield number, images, targets


def evaluate(
    model: nn.Module,
    images: Images,
    *,
    accelerator: Accelerator | None = None,
    advance: Callable[[int], None] | None = None,
    keep: Callable[[list[dict[str, Any]]], None] | None = None,
) -> dict[str, Any]:
    """COCO's twelve numbers in percent, "box_AP" to "mask_ARl", None where there is nothing to find; "images", and
    "images_per_second" of the detector alone: no decoding, no transfer.

    accelerator: of a run on several processes. Every process returns the numbers of all images.
    advance: called with the number of images done after each batch.
    keep: called with all detections, as COCO results in the order of the images, in the first process.

    What is random in a method is drawn for each batch from its number. The speed is the median over batches without the
    first one, which compiles kernels and fills caches; a batch that is alone runs twice. Those of processes add up.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    speeds: list[float] = []
    results: list[dict[str, Any]] = []
    try:
        for number, pictures, targets in images:
            inputs = [picture.to(like.device, like.dtype) for picture in pictures]
            run = partial(model, original_sizes=[target["original_size"] for target in targets])
            for _ in range(2 if len(images) == 1 else 1):
                seed_everything("evaluation", number)
                with nullcontext() if accelerator is None else accelerator.autocast():
                    spent, found = timed_pass(run, inputs)
                speeds.append(len(inputs) / spent)
            image_ids = [target["image_id"] for target in targets]
            results += as_coco_results(found, image_ids, images.data.category_ids)
            if advance is not None:
                advance(len(inputs))
    finally:
        model.train(was_training)
    speed = median(speeds[1:] or [0.0])
    if accelerator is not None:
        speed = float(accelerator.reduce(torch.tensor([speed], device=like.device), "sum"))
    numbers = _of_all(results, images.data, accelerator, keep)
    return {**numbers, "images": len(images.data), "images_per_second": speed}


def _of_all(
    results: list[dict[str, Any]],
    data: DetectionData,
    accelerator: Accelerator | None,
    keep: Callable[[list[dict[str, Any]]], None] | None,
) -> dict[str, float | None]:
    """The numbers of all processes' detections. One process computes them; the others are told."""
    several = accelerator is not None and accelerator.num_processes > 1
    if several:
        from accelerate.utils import gather_object

        results = gather_object(results)
    numbers: list[Any] = [None]
    if accelerator is None or accelerator.is_main_process:
        place = {image_id: place for place, image_id in enumerate(data.image_ids)}
        results = sorted(results, key=lambda result: place[result["image_id"]])
        if keep is not None:
            keep(results)
        found = average_precision(data.ground_truth, results)
        numbers = [
            {
                f"{KINDS[kind]}_{name}": None if math.isnan(value) else 100 * value
                for kind, of_kind in found.items()
                for name, value in of_kind.items()
            }
        ]
    if several:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(numbers)
    known: dict[str, float | None] = numbers[0]
    return known
