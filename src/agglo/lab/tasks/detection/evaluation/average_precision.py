"""COCO's twelve numbers for boxes and for masks, by faster-coco-eval, and the speed of a detector over images."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from faster_coco_eval import COCO, COCOeval_faster
from torch import nn
from torch.utils.data import DataLoader
from torchvision.ops import box_convert

from agglo.lab.tasks.detection.data import DetectionData, collate
from agglo.lab.tasks.detection.data.base import Transform, encode
from agglo.utils.randomness import seed_everything
from agglo.utils.timing import timed_pass

if TYPE_CHECKING:
    from accelerate import Accelerator

KINDS = {"bbox": "box", "segm": "mask"}  # COCO's names, and those of reports

# In the order of COCO's summary. AP over IoU .50 to .95 and at two of them; of objects below 32 x 32 pixels, below
# 96 x 96, and larger ones; then the recall with 1, 10 and 100 detections per image, and of the three sizes.
NUMBERS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


def average_precision(
    ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return the twelve numbers of "bbox" and of "segm", from 0 to 1; nan where there is no object to find.

    Args:
        ground_truth: Images, annotations and categories as in a COCO file.
        detections: COCO results. The size of a detection is that of its mask for "segm", as in MMDetection.
    """
    numbers = {}
    for kind in KINDS:
        evaluation = coco_evaluation(ground_truth, detections, kind)
        evaluation.run()
        values = zip(NUMBERS, map(float, evaluation.stats), strict=False)
        numbers[kind] = {name: math.nan if value < 0 else value for name, value in values}
    return numbers


def coco_evaluation(
    ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kind: str, **options: Any
) -> Any:
    """Return faster-coco-eval's evaluation, not run yet, on copies of what is given.

    Raises:
        ValueError: A detection is in an image or of a category that the ground truth does not have, or its score is
            not finite. The library would leave out an unknown category silently.
    """
    images, categories = ({entry["id"] for entry in ground_truth[key]} for key in ("images", "categories"))
    for number, entry in enumerate(detections):
        image, category, score = entry["image_id"], entry["category_id"], entry["score"]
        if image not in images or category not in categories or not math.isfinite(score):
            raise ValueError(f"detection {number} does not fit: image {image}, category {category}, score {score}")
    # The library writes into what it is given, and takes an object with id 0 for no object.
    annotations = [{**entry, "id": number} for number, entry in enumerate(ground_truth["annotations"], start=1)]
    truth = COCO({**ground_truth, "annotations": annotations})
    # With a box, the library would take the box's area for the mask's.
    left_out = "bbox" if kind == "segm" else "segmentation"
    found = [{key: value for key, value in entry.items() if key != left_out} for entry in detections]
    return COCOeval_faster(truth, truth.loadRes(found), kind, **options)


def as_coco_results(
    detections: Sequence[Mapping[str, Any]], image_ids: Sequence[int], category_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a detector's outputs for several images as COCO results that JSON can hold.

    category_ids has the category of each label.
    """
    results = []
    for found, image_id in zip(detections, image_ids, strict=True):
        boxes = box_convert(found["boxes"].cpu().double(), "xyxy", "xywh").tolist()
        scores, labels = (found[key].cpu().tolist() for key in ("scores", "labels"))
        for box, score, label, mask in zip(boxes, scores, labels, encode(found["masks"].cpu().numpy()), strict=True):
            about = {"image_id": int(image_id), "category_id": int(category_ids[label])}
            results.append({**about, "bbox": box, "score": score, "segmentation": mask})
    return results


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
    the images. The detector is left in eval mode.
    """
    like, data = next(model.parameters()), images.data
    model.eval()
    speeds: list[float] = []
    results: list[dict[str, Any]] = []
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
