"""The settings that decide what the training of a detector does, and its recipes, `recipes/*.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from agglo.lab.options import Amount, AtLeastOne, Fraction, Whole, option, require_limits
from agglo.lab.tasks.detection.specs import DetectorSpec
from agglo.lab.training.recipes import Recipes
from agglo.lab.training.settings import DropSettings, ReductionSettings


@dataclass(frozen=True)
class DetectionSettings(ReductionSettings, DropSettings):
    """The settings of a recipe and the command line; epochs are counted from the start of training."""

    # What is trained
    model: str = option("tiny", "tiny, small (DeiT's shapes), miniature (the embedded classifier's), or a timm ViT")
    checkpoint: str | None = option(None, "starting weights: a file of a timm ViT, of a detector, or a published one")
    from_scratch: bool = option(
        False, "start without a file: from random weights, or for miniature from the embedded classifier"
    )
    class_token: bool = option(
        False, "give the backbone a class token, for methods that ask what it attends to (evit, topk, ats, evovit)"
    )
    backbone_options: dict[str, Any] = option({}, "arguments of the timm ViT")
    adapter_options: dict[str, Any] = option({}, "arguments of vit_adapter: prior_width, deform_heads, ...")
    head_options: dict[str, Any] = option({}, "numbers of Mask R-CNN: width, anchor_scale, box_width, ...")

    # Data
    dataset: Literal["coco", "scenes"] = option(
        "coco", "coco: COCO's layout, or any JSON of instances; scenes: made from Fashion-MNIST's files"
    )
    image_size: AtLeastOne | None = option(
        None, "make every image a square of this side; none is the paper's way: many scales and crops"
    )
    flip: Fraction = option(0.5, "probability of mirroring an image")
    held_out: Fraction = option(
        0.0, "fraction of the training images kept for validation, for data without such a split; 0 takes the split"
    )
    images: AtLeastOne | None = option(
        None, "only so many, evenly spread, and without held_out judged by the same: to overfit a dozen; none is all"
    )
    scenes: AtLeastOne = option(4000, "training scenes")
    validation_scenes: AtLeastOne = 200

    # Optimisation, where it is not as for every task
    epochs: AtLeastOne = 36
    batch_size: AtLeastOne = 2
    lr: Amount = 1e-4
    lr_batch: AtLeastOne = 16
    weight_decay: Amount = option(0.05, "not for norms, biases, position and level embeddings")

    # Running
    loss_scale: Amount = option(512.0, "that fp16 starts with")
    ranked_by: Literal["box_AP", "mask_AP"] = option("box_AP", "what says which weights are best")
    evaluation_batch_size: AtLeastOne = option(
        1, "images of several sizes are padded to the largest, which changes a little what is found"
    )
    workers: Whole = option(2, "processes that load images")

    def __post_init__(self) -> None:
        require_limits(self)
        self.require_reduction()
        if self.from_scratch == (self.checkpoint is not None):
            problem = "weights and from_scratch=true exclude each other" if self.from_scratch else "no starting weights"
            raise ValueError(f"{problem}: give one of checkpoint=F and from_scratch=true")
        if self.held_out and (self.held_out == 1 or self.dataset == "scenes"):
            raise ValueError(f"held_out={self.held_out:g}: below 1 is accepted, and for files only")
        self.require_rates()

    def spec(self, classes: list[str]) -> DetectorSpec:
        """Return the detector of these settings for certain classes."""
        adapter = {**({"class_token": True} if self.class_token else {}), **self.adapter_options}
        parts = (self.backbone_options, adapter, self.head_options)
        return DetectorSpec(self.model, len(classes), *parts, tuple(classes), self.image_size)


# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"workers", "checkpoint_minutes", "tracker", "from_scratch"})

RECIPES = Recipes(DetectionSettings, "agglo.lab.tasks.detection.training")
