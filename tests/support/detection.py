"""Made-up data in COCO's format, and a detector that trains in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agglo.lab.tasks.detection.training.settings import DetectionSettings

CLASSES = ("red square", "blue disc")
COLOURS = ((230, 40, 40), (40, 60, 230))
# A detector of a few ten thousand parameters, with few proposals: a step takes a fraction of a second.
SMALL_MODEL: dict[str, Any] = {
    "model": "vit_tiny_patch16_224",
    "backbone_options": {"embed_dim": 32, "depth": 4, "num_heads": 2, "patch_size": 8, "img_size": 64},
    "adapter_options": {"interactions": 2, "deform_heads": 2, "prior_width": 8, "drop_path": 0.1},
    "head_options": {
        "width": 32,
        "box_width": 64,
        "mask_convolutions": 1,
        "anchor_scale": 4,
        "finest_scale": 14,
        "training_proposals": {"per_level": 60, "kept": 60},
        "test_proposals": {"per_level": 60, "kept": 60},
        "proposal_assignment": {"samples": 64},
        "box_assignment": {"samples": 32},
    },
}


def write_coco(root: Path, n_train: int = 6, n_validation: int = 4) -> Path:
    """COCO 2017's layout: grey noise with two or three things on it, in images of several sizes."""
    random = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", n_train), ("val", n_validation)):
        (root / f"{split}2017").mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(1, count + 1):
            height, width = (int(side) for side in random.integers(56, 72, 2))
            pixels = random.integers(90, 160, (height, width, 3), dtype=np.uint8)
            for thing in range(2 + number % 2):
                annotations.append(_thing(random, pixels, len(annotations) + 1, number, thing % 2))
            name = f"{number:012}.png"
            Image.fromarray(pixels).save(root / f"{split}2017" / name)
            images.append({"id": number, "file_name": name, "height": height, "width": width})
        categories = [{"id": 3 + 4 * label, "name": name} for label, name in enumerate(CLASSES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return root


def _thing(random: Any, pixels: Any, number: int, image: int, label: int) -> dict[str, Any]:
    side = int(random.integers(18, 30))
    top, left = (int(random.integers(0, length - side)) for length in pixels.shape[:2])
    if label == 0:
        corners = [(0, 0), (side, 0), (side, side), (0, side)]
    else:
        angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        corners = [(side / 2 * (1 + np.cos(angle)), side / 2 * (1 + np.sin(angle))) for angle in angles]
    rows, columns = np.mgrid[:side, :side] + 0.5
    inside = (rows - side / 2) ** 2 + (columns - side / 2) ** 2 <= (side / 2) ** 2 if label else rows > 0
    pixels[top : top + side, left : left + side][inside] = COLOURS[label]
    return {
        "id": number,
        "image_id": image,
        "category_id": 3 + 4 * label,
        "bbox": [left, top, side, side],
        "area": float(inside.sum()),
        "iscrowd": 0,
        "segmentation": [[float(value) for x, y in corners for value in (left + x, top + y)]],
    }


def quick_detection(**changes: Any) -> DetectionSettings:
    """Two epochs of three steps, with a checkpoint at each step, on what `write_coco` writes."""
    how = {
        "epochs": 2,
        "batch_size": 2,
        "lr_batch": 2,
        "lr": 1e-3,
        "warmup_steps": 2,
        "lr_drops": [1],
        "clip_grad": 1.0,
    }
    kept = {"from_scratch": True, "image_size": 64, "workers": 0, "checkpoint_minutes": 0.0}
    values: dict[str, Any] = {**SMALL_MODEL, **how, **kept, **changes}
    return DetectionSettings(**values)
