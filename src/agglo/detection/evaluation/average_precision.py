"""COCO's twelve numbers for boxes and for masks, by faster-coco-eval.

results = as_coco_results(detections, image_ids, data.category_ids)
average_precision(data.ground_truth, results)["segm"]["AP"]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agglo.detection.data.masks import encoded

KINDS = ("bbox", "segm")

# In the order of COCO's summary. AP over IoU .50 to .95 and at two of them; of objects below 32 x 32 pixels, below
# 96 x 96, and larger ones; then the recall with 1, 10 and 100 detections per image, and of the three sizes.
NUMBERS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")

Result = dict[str, Any]


def average_precision(
    ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kinds: Sequence[str] = KINDS
) -> dict[str, dict[str, float]]:
    """By kind, the twelve numbers, from 0 to 1. nan where there is nothing to find: COCO's own tool says -1.

    ground_truth: images, annotations and categories as in a COCO file. detections: COCO results. Neither is changed.
    Sizes of detected objects are those of the mask if kind is "segm", as in MMDetection.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(map(repr, KINDS))}")
    require_known(ground_truth, detections)
    numbers = {}
    for kind in kinds:
        # The tool writes into what it is given.
        copies = [dict(entry) for entry in ground_truth["annotations"]]
        truth = COCO({**ground_truth, "annotations": copies})
        if not copies:
            numbers[kind] = dict.fromkeys(NUMBERS, math.nan)
            continue
        evaluation = COCOeval_faster(truth, truth.loadRes(of_kind(detections, kind)), kind)
        evaluation.run()
        values = [float(value) for value in evaluation.stats[: len(NUMBERS)]]
        numbers[kind] = {name: math.nan if value < 0 else value for name, value in zip(NUMBERS, values, strict=True)}
    return numbers


def of_kind(detections: Sequence[Mapping[str, Any]], kind: str) -> list[Result]:
    """Copies with what a kind is judged by. With a box, COCO takes its area for the mask's."""
    left_out = "bbox" if kind == "segm" else "segmentation"
    return [{key: value for key, value in entry.items() if key != left_out} for entry in detections]


def require_known(ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]]) -> None:
    """ValueError for a detection in an image or of a category that the ground truth does not have, or without a
    number as score: COCO's tool would leave out the second kind without a word."""
    images = {entry["id"] for entry in ground_truth["images"]}
    categories = {entry["id"] for entry in ground_truth["categories"]}
    for number, entry in enumerate(detections):
        if entry["image_id"] not in images:
            raise ValueError(f"detection {number} is in image {entry['image_id']}, which is not in the ground truth")
        if entry["category_id"] not in categories:
            raise ValueError(f"detection {number} is of category {entry['category_id']}, not in the ground truth")
        if not math.isfinite(entry["score"]):
            raise ValueError(f"detection {number} has the score {entry['score']}")


def as_coco_results(
    detections: Sequence[Mapping[str, Any]], image_ids: Sequence[int], category_ids: Sequence[int]
) -> list[Result]:
    """What a detector gives, one dict per image, as COCO results that JSON can hold.

    detections: boxes (n, 4) xyxy, scores (n,), labels (n,) from 0, masks (n, H, W) of the original size.
    category_ids: of each label.
    """
    if len(detections) != len(image_ids):
        raise ValueError(f"{len(detections)} detections do not fit {len(image_ids)} image ids")
    results = []
    for found, image_id in zip(detections, image_ids, strict=True):
        boxes, scores, labels = (np.asarray(found[key].cpu()) for key in ("boxes", "scores", "labels"))
        if labels.size and not 0 <= labels.min() <= labels.max() < len(category_ids):
            raise ValueError(f"image {image_id} has labels {labels.min()} to {labels.max()} of {len(category_ids)}")
        masks = encoded(np.asarray(found["masks"].cpu()))
        for box, score, label, mask in zip(boxes.astype(float), scores, labels, masks, strict=True):
            left, top, right, bottom = box.tolist()
            results.append(
                {
                    "image_id": int(image_id),
                    "category_id": int(category_ids[label]),
                    "bbox": [left, top, right - left, bottom - top],
                    "score": float(score),
                    "segmentation": mask,
                }
            )
    return results
