"""One pass of a detector over images: COCO's numbers, and the speed of the detector alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from agglo.lab.tasks.detection.data import DetectionData, collate
from agglo.lab.tasks.detection.data.base import Transform
from agglo.lab.tasks.detection.evaluation.average_precision import KINDS, as_coco_results, average_precision
from agglo.utils.randomness import seed_everything
from agglo.utils.timing import timed_pass

if TYPE_CHECKING:
    from accelerate import Accelerator


class DetectionBatches(DataLoader[Any]):
    """Batches of a data set, the same for any number of processes, which take turns with them."""

    def __init__(
        self,
        data: DetectionData,
        transform: Transform,
        *,
        batch_size: int = 1,
        workers: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.data = data
        process, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
        batches = [list(range(len(data))[start : start + batch_size]) for start in range(0, len(data), batch_size)]
        self.numbers = range(len(batches))[process::processes]
        how: dict[str, Any] = {"batch_sampler": batches[process::processes], "num_workers": workers}
        super().__init__(data.prepared(transform, annotated=False), collate_fn=collate, **how)


def evaluate(
    model: nn.Module,
    images: DetectionBatches,
    *,
    accelerator: Accelerator | None = None,
    advance: Callable[[], None] | None = None,
    keep: Callable[[list[dict[str, Any]]], None] | None = None,
) -> dict[str, Any]:
    """Return COCO's numbers of a detector in percent, "box_AP" to "mask_ARl", "images" and "images_per_second".

    A number is None where there is no object to find. What is random in a method is drawn for each batch from its
    number. The speed is of the detector alone: the median over batches without the first one, which compiles kernels
    and fills caches; a batch that is alone runs twice. Several processes return the same, and their speeds add up.

    advance is called after each batch; keep in the first process, with all detections as COCO results in the order of
    the images.
    """
    like, data = next(model.parameters()), images.data
    was_training = model.training
    model.eval()
    speeds: list[float] = []
    results: list[dict[str, Any]] = []
    try:
        for number, (batch, targets) in zip(images.numbers, images, strict=True):
            inputs = [image.to(like.device, like.dtype) for image in batch]
            run = partial(model, original_sizes=[target["original_size"] for target in targets])
            for _ in range(2 if len(images) == 1 else 1):
                seed_everything("evaluation", number)
                with nullcontext() if accelerator is None else accelerator.autocast():
                    spent, found = timed_pass(run, inputs)
                speeds.append(len(inputs) / spent)
            results += as_coco_results(found, [target["image_id"] for target in targets], data.category_ids)
            if advance is not None:
                advance()
    finally:
        model.train(was_training)
    speed = median(speeds[1:] or [0.0])
    if accelerator is not None:
        from accelerate.utils import gather_object

        speed = float(accelerator.reduce(torch.tensor([speed], device=like.device), "sum"))
        results = gather_object(results)
    order = {image_id: index for index, image_id in enumerate(data.image_ids)}
    results.sort(key=lambda result: order[result["image_id"]])
    if keep is not None and (accelerator is None or accelerator.is_main_process):
        keep(results)
    numbers = {
        f"{KINDS[kind]}_{name}": None if math.isnan(value) else 100 * value
        for kind, found in average_precision(data.ground_truth, results).items()
        for name, value in found.items()
    }
    return {**numbers, "images": len(data), "images_per_second": speed}
