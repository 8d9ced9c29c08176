"""Everything that decides what the training of a detector does: one flat, checked list of settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agglo.detection.specs import DetectorSpec
from agglo.experiments.training.loop_settings import DropSettings
from agglo.experiments.training.reduction import ReductionSettings
from agglo.experiments.training.settings import Amount, AtLeastOne, Share, Whole, require_limits


@dataclass(frozen=True)
class DetectionSettings(ReductionSettings, DropSettings):
    """What a recipe and the command line settle. Numbers of epochs count from the start of training."""

    # What is trained
    model: str = "tiny"
    """tiny, small (DeiT's shapes), miniature (the embedded classifier's), or a timm ViT"""
    checkpoint: str | None = None
    """starting weights: a file of a timm ViT (DeiT, AugReg), of a detector, or a published one"""
    from_scratch: bool = False
    """start without a file: from random weights, or for miniature from the embedded classifier"""
    class_token: bool = False
    """give the backbone a class token, for methods that ask what it attends to (evit, topk, ats, evovit)"""
    backbone_options: dict[str, Any] = field(default_factory=dict)
    """arguments of the timm ViT"""
    adapter_options: dict[str, Any] = field(default_factory=dict)
    """arguments of vit_adapter: prior_width, deform_heads, padding, ..."""
    head_options: dict[str, Any] = field(default_factory=dict)
    """numbers of Mask R-CNN: width, anchor_scale, box_width, ..."""

    # Data
    dataset: Literal["coco", "scenes"] = "coco"
    """coco: COCO's layout, or any JSON of instances; scenes: made from Fashion-MNIST's files"""
    image_size: int | None = None
    """make every image a square of this side; none is the paper's way: many scales and crops"""
    flip: Share = 0.5
    """probability of mirroring an image"""
    held_out: Share = 0.0
    """fraction of the training images that is kept for validation, for data without such a split; 0 takes the split"""
    images: int | None = None
    """only so many, evenly spread, and without held_out judged by the same ones: to overfit a dozen; none is all"""
    scenes: AtLeastOne = 4000
    """training scenes"""
    validation_scenes: AtLeastOne = 200
    skip_bad: bool = False
    """leave out bad images and annotations and count them; every process reads all images once to find them"""

    # Optimisation, where it is not as for every task
    epochs: AtLeastOne = 36
    batch_size: AtLeastOne = 2
    lr: Amount = 1e-4
    lr_batch: AtLeastOne = 16
    weight_decay: Amount = 0.05
    """not for norms, biases, position and level embeddings"""

    # Running
    loss_scale: Amount = 512.0
    """that fp16 starts with"""
    ranked_by: Literal["box_AP", "mask_AP"] = "box_AP"
    """what says which weights are best"""
    evaluation_batch_size: AtLeastOne = 1
    """images of several sizes are padded to the largest, which changes a little what is found"""
    workers: Whole = 2
    """processes that load images"""

    def __post_init__(self) -> None:
        require_limits(self)
        self.require_reduction()
        if self.from_scratch == (self.checkpoint is not None):
            problem = "weights and from_scratch=true exclude each other" if self.from_scratch else "no starting weights"
            raise ValueError(f"{problem}: give one of checkpoint=F and from_scratch=true")
        for name in ("image_size", "images"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1, or none")
        if self.held_out == 1:
            raise ValueError("held_out=1 leaves no image to train on; below 1 is accepted")
        if self.held_out and self.dataset == "scenes":
            raise ValueError(f"held_out={self.held_out:g} is for files; scenes have a split of their own")
        self.require_rates()

    def spec(self, classes: list[str]) -> DetectorSpec:
        """The detector of these settings, for certain classes."""
        return DetectorSpec(
            self.model,
            len(classes),
            self.backbone_options,
            {**({"class_token": True} if self.class_token else {}), **self.adapter_options},
            self.head_options,
            tuple(classes),
            self.image_size,
        )


# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"workers", "checkpoint_minutes", "tracker", "from_scratch"})
