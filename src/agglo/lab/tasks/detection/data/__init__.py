"""Images with objects: COCO files, scenes made from Fashion-MNIST, and their transforms."""

from agglo.lab.tasks.detection.data.base import DetectionData, collate
from agglo.lab.tasks.detection.data.coco import CocoImages, open_coco
from agglo.lab.tasks.detection.data.scenes import Scenes, make_scenes
from agglo.lab.tasks.detection.data.transforms import transforms_for

__all__ = ["CocoImages", "DetectionData", "Scenes", "collate", "make_scenes", "open_coco", "transforms_for"]
