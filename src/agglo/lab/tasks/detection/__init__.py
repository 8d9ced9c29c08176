"""Detection and instance segmentation: Mask R-CNN on a ViT-Adapter, whose tokens any method may reduce.

>>> detector = agglo.lab.detection.vit_adapter("tiny").eval()  # weights="deit_tiny.safetensors" for a start
>>> _ = agglo.apply(detector, keep_rate=0.7)
>>> agglo.report(detector, n_tokens=400).counts[-1]
137
"""

from __future__ import annotations

from typing import Any

__all__ = ["vit_adapter"]


def vit_adapter(*arguments: Any, **options: Any) -> Any:
    """Build a detector; see `agglo.lab.tasks.detection.specs.vit_adapter`."""
    from agglo.lab.tasks.detection import specs  # timm and torchvision are needed by the detector only

    return specs.vit_adapter(*arguments, **options)
