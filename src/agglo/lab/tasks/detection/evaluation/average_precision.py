"""COCO's twelve numbers for boxes and for masks, by faster-coco-eval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from faster_coco_eval import COCO, COCOeval_faster
from torchvision.ops import box_convert

from agglo.lab.tasks.detection.data.base import encode

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
        evaluation, values = coco_evaluation(ground_truth, detections, kind), [-1.0] * len(NUMBERS)
        if evaluation is not None:
            evaluation.run()
            values = [float(value) for value in evaluation.stats[: len(NUMBERS)]]
        numbers[kind] = {n: math.nan if value < 0 else value for n, value in zip(NUMBERS, values, strict=True)}
    return numbers


def coco_evaluation(
    ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kind: str, **options: Any
) -> Any:
    """Return faster-coco-eval's evaluation, not run yet, on copies of what is given; None without annotations.

    Raises:
        ValueError: A detection is in an image or of a category that the ground truth does not have, or its score is
            not finite. The library would leave out an unknown category silently.
    """
    images, categories = ({entry["id"] for entry in ground_truth[key]} for key in ("images", "categories"))
    for number, entry in enumerate(detections):
        image, category, score = entry["image_id"], entry["category_id"], entry["score"]
        if image not in images or category not in categories or not math.isfinite(score):
            raise ValueError(f"detection {number} does not fit: image {image}, category {category}, score {score}")
    if not ground_truth["annotations"]:
        return None
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
