"""Images with objects: COCO files, scenes made from Fashion-MNIST, and how they are prepared for a detector."""

from __future__ import annotations

from agglo.detection.data.base import DetectionData, collate
from agglo.detection.data.coco import CocoImages, open_coco
from agglo.detection.data.scenes import Scenes, make_scenes
from agglo.detection.data.transforms import transforms_for

__all__ = ["CocoImages", "DetectionData", "Scenes", "collate", "make_scenes", "open_coco", "transforms_for"]
