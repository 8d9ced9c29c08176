"""Everything that decides what a fine-tuning run does: one flat, checked list of settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from agglo.experiments.training.loop_settings import CosineSettings
from agglo.experiments.training.reduction import OF_METHOD as OF_ANY_METHOD
from agglo.experiments.training.reduction import ReductionSettings
from agglo.experiments.training.settings import Amount, AtLeastOne, Share, Whole, require_limits


@dataclass(frozen=True)
class TrainingSettings(ReductionSettings, CosineSettings):
    """What a recipe and the command line settle. Numbers of epochs count from the start of training."""

    # What is trained
    model: str = "deit_small_patch16_224"
    """of timm by its name, or of another library: hf:PATH, torchvision:NAME, open_clip:NAME"""
    checkpoint: str | None = None
    """starting weights: a file; its head is replaced where the number of classes differs"""
    pretrained: bool = False
    """start from the published weights (downloads them), or those of the folder that model names"""
    global_pool: str | None = None
    """what the head reads: token, avg; none is the model's own"""
    head_std: float | None = None
    """deviation of a new head's starting weights; none is the model's own start"""
    from_scratch: bool = False
    """start from random weights"""
    dataset: str = "imagenet"
    """by name; `agglo finetune --help` lists them"""
    skip_bad: bool = False
    """leave out missing and unreadable images and count them; every process reads all images once to find them"""

    # What goes with token reduction
    distill: bool = False
    """learn from the dense teacher too (DynamicViT)"""
    teacher: str | None = None
    """weights of the teacher; none is the starting weights"""

    # Optimisation, where it is not as for every task
    batch_size: AtLeastOne = 256
    lr_batch: AtLeastOne = 1024
    weight_decay: Amount = 0.05
    """not for vectors, biases, position embeddings and class tokens"""
    layer_decay: Amount = 1.0
    """rate of each block in proportion to the next one's"""
    backbone_lr_scale: Amount = 1.0
    """rate of what was trained before in proportion to new modules, head, patch and position embeddings"""
    frozen_epochs: Whole = 0
    """epochs in which the backbone stays as it is"""

    # Regularisation
    drop_path: Share = 0.1
    label_smoothing: Share = 0.1
    mixup: Amount = 0.8
    cutmix: Amount = 1.0
    mixup_probability: Share = 1.0
    mixup_switch: Share = 0.5
    """how often CutMix is taken where both could be"""
    ema_decay: Share = 0.99996
    patch_drop_rates: list[float] = field(default_factory=list)
    """fraction of patches left out of each training image, epoch by epoch; epochs after these see all patches"""

    # Augmentation (of each data set, unless a recipe says otherwise)
    randaugment: str | None = None
    """timm's RandAugment policy"""
    colour_jitter: Amount = 0.0
    """has no effect beside randaugment"""
    erasing: Share = 0.0
    """probability of random erasing"""
    cutout: bool = False
    """one rectangle of half the side in a random colour"""
    flip: Share = 0.5
    """probability of mirroring an image"""
    shift: int | None = None
    """in place of a random crop: pixels an image moves at most"""
    repeated_augmentation: AtLeastOne = 3
    """times an image comes in one epoch, which sees fewer images then; in runs of several processes"""
    in_memory: bool = False
    """keep small images of one size in memory, and shift, mirror and erase whole batches of them"""

    # Running
    evaluate_first: bool = True
    evaluation_batch_size: AtLeastOne = 256
    workers: Whole = 2
    """processes that load images"""

    def __post_init__(self) -> None:
        require_limits(self)
        self._require_coherence()

    def _require_coherence(self) -> None:
        self.require_reduction(OF_METHOD)
        if self.patch_drop_rates and self.method != "none":
            raise ValueError(
                f"patch_drop_rates={self.patch_drop_rates} and method={self.method!r} exclude each other: "
                "--set patch_drop_rates=[] or --method none"
            )
        if any(not 0 <= rate < 1 for rate in self.patch_drop_rates):
            raise ValueError(f"patch_drop_rates={self.patch_drop_rates} must lie in 0 to 1, without 1")
        if self.in_memory and (self.randaugment or self.colour_jitter or self.cutout or self.shift is None):
            raise ValueError("in_memory=true needs a shift, and goes without randaugment, colour_jitter and cutout")
        if self.checkpoint is not None and self.pretrained:
            raise ValueError(f"give either pretrained=true or checkpoint={self.checkpoint!r}, not both")
        if self.from_scratch == (self.pretrained or self.checkpoint is not None):
            problem = "weights and from_scratch=true exclude each other" if self.from_scratch else "no starting weights"
            raise ValueError(f"{problem}: give one of checkpoint=F, pretrained=true and from_scratch=true")
        self.require_rates()


# All that mean nothing without a method.
OF_METHOD = (*OF_ANY_METHOD, "distill")
# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"workers", "checkpoint_minutes", "tracker", "evaluation_batch_size", "from_scratch"})
# What `transforms.Augmentation` knows by the same names.
AUGMENTATION_SETTINGS = ("randaugment", "colour_jitter", "erasing", "cutout", "flip", "shift")
