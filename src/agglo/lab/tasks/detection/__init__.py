"""Detection and instance segmentation: Mask R-CNN on a ViT-Adapter, whose tokens any method may reduce.

>>> detector = agglo.lab.detection.vit_adapter("tiny").eval()  # weights="deit_tiny.safetensors" for a start
>>> _ = agglo.apply(detector, keep_rate=0.7)
>>> agglo.report(detector, n_tokens=400).counts[-1]
137
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agglo.lab.tasks.detection.specs import vit_adapter

__all__ = ["vit_adapter"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: torchvision and timm are needed by the detector only."""
    if name == "vit_adapter":
        from agglo.lab.tasks.detection.specs import vit_adapter

        return vit_adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
