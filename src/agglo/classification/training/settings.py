"""Everything that decides what a fine-tuning run does: one flat, checked list of settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from agglo.experiments.training.settings import (
    Amount,
    AtLeastOne,
    Precision,
    Share,
    Whole,
    choices,
    require_limits,
)
from agglo.methods import create
from agglo.schedule import Stages, parse_schedule


@dataclass(frozen=True)
class TrainingSettings:
    """What a recipe and the command line settle. Numbers of epochs count from the start of training."""

    # What is trained
    model: str = "deit_small_patch16_224"
    """as timm knows it"""
    checkpoint: str | None = None
    """starting weights: a file; its head is replaced where the number of classes differs"""
    pretrained: bool = False
    """start from timm's published weights (downloads them)"""
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

    # Token reduction
    method: str = "none"
    """atc, tome, evit, ... or none to train the dense model"""
    keep_rate: float | None = None
    """fraction of patch tokens that stays at each of three stages"""
    threshold: float | None = None
    """in place of keep_rate: the cosine distance up to which tokens merge at each of three stages"""
    schedule: str | None = None
    """in place of keep_rate: such as stages:0.9,0.7,0.5@3,6,9, constant:16 or linear:16"""
    linkage: str | None = None
    """of atc: single, average, complete"""
    proportional: bool | None = None
    """let merged tokens weigh as much in attention as their members; none leaves it to the method"""
    method_options: dict[str, Any] = field(default_factory=dict)
    """further options of the method, by name"""
    distill: bool = False
    """learn from the dense teacher too (DynamicViT)"""
    teacher: str | None = None
    """weights of the teacher; none is the starting weights"""

    # Optimisation (AdamW, cosine schedule by step)
    epochs: AtLeastOne = 30
    batch_size: AtLeastOne = 256
    """of one process and one accumulation step"""
    accumulation: AtLeastOne = 1
    """batches whose gradients make one step"""
    lr: Amount = 1e-3
    """at a total batch (batch_size x accumulation x processes) of lr_batch, and in proportion at others"""
    lr_batch: AtLeastOne = 1024
    min_lr: Amount = 1e-5
    """where the cosine ends; scaled with each group's rate"""
    warmup_lr: Amount = 1e-6
    """where warm-up starts; scaled with each group's rate"""
    warmup_epochs: Amount = 5.0
    cosine_after_warmup: bool = False
    """start the cosine when warm-up is over; otherwise warm-up replaces its beginning"""
    weight_decay: Amount = 0.05
    """not for vectors, biases, position embeddings and class tokens"""
    layer_decay: Amount = 1.0
    """rate of each block in proportion to the next one's"""
    backbone_lr_scale: Amount = 1.0
    """rate of what was trained before in proportion to new modules, head, patch and position embeddings"""
    frozen_epochs: Whole = 0
    """epochs in which the backbone stays as it is"""
    clip_grad: Amount = 0.0
    """largest gradient norm; 0 is no limit"""

    # Regularisation
    drop_path: Share = 0.1
    label_smoothing: Share = 0.1
    mixup: Amount = 0.8
    cutmix: Amount = 1.0
    mixup_probability: Share = 1.0
    mixup_switch: Share = 0.5
    """how often CutMix is taken where both could be"""
    ema_decay: Share = 0.99996
    """of the average of the weights; 0 is none"""
    ema_warmup: bool = False
    """let the average forget faster at first"""
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
    seed: Whole = 0
    precision: Precision = "no"
    """mixed precision: no, bf16, fp16, or auto: fp16 on GPUs and none on CPUs"""
    evaluate_first: bool = True
    """before training too: a row of the log, never the best one"""
    evaluate_every: AtLeastOne = 1
    """epochs from one evaluation to the next; after the last one always"""
    evaluation_batch_size: AtLeastOne = 256
    workers: Whole = 2
    """processes that load images"""
    checkpoint_minutes: Amount = 10.0
    """longest time between checkpoints"""
    tracker: str = "none"
    """besides log.csv: tensorboard, wandb, or any other that Accelerate knows"""

    def __post_init__(self) -> None:
        require_limits(self)
        self._require_coherence()

    @property
    def all_method_options(self) -> dict[str, Any]:
        """Of the method, with its linkage."""
        return {**self.method_options, **({} if self.linkage is None else {"linkage": self.linkage})}

    def _require_reduction(self) -> None:
        """A method with a budget it can have, or neither."""
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name) is not None}
        if self.method == "none":
            for name in OF_METHOD:
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)!r} needs a method, such as --method atc")
            return
        create(self.method, **self.all_method_options)
        if not given:
            needed = f"{', '.join(BUDGETS[:-1])} and {BUDGETS[-1]}"
            raise ValueError(
                f"method={self.method!r} needs one of {needed}, such as --keep-rate 0.5 or --schedule linear:16"
            )
        if len(given) > 1:
            both = " and ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"{both}: give one of them; the others are none")
        if self.keep_rate is not None:
            Stages(self.keep_rate)
        if self.schedule is not None:
            parse_schedule(self.schedule)
        if self.patch_drop_rates:
            raise ValueError(
                f"patch_drop_rates={self.patch_drop_rates} and method={self.method!r} exclude each other: "
                "--set patch_drop_rates=[] or --method none"
            )

    def _require_coherence(self) -> None:
        self._require_reduction()
        if any(not 0 <= rate < 1 for rate in self.patch_drop_rates):
            raise ValueError(f"patch_drop_rates={self.patch_drop_rates} must lie in 0 to 1, without 1")
        if self.in_memory and (self.randaugment or self.colour_jitter or self.cutout or self.shift is None):
            raise ValueError("in_memory=true needs a shift, and goes without randaugment, colour_jitter and cutout")
        if self.checkpoint is not None and self.pretrained:
            raise ValueError(f"give either pretrained=true or checkpoint={self.checkpoint!r}, not both")
        if self.from_scratch == (self.pretrained or self.checkpoint is not None):
            problem = "weights and from_scratch=true exclude each other" if self.from_scratch else "no starting weights"
            raise ValueError(f"{problem}: give one of checkpoint=F, pretrained=true and from_scratch=true")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs:g} must not exceed epochs={self.epochs}")


# The settings that say how many tokens stay, of which a run has one, and all that mean nothing without a method.
BUDGETS = ("keep_rate", "threshold", "schedule")
OF_METHOD = (*BUDGETS, "linkage", "proportional", "method_options", "distill")
# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"workers", "checkpoint_minutes", "tracker", "evaluation_batch_size", "from_scratch"})
# What `transforms.Augmentation` knows by the same names.
AUGMENTATION_SETTINGS = ("randaugment", "colour_jitter", "erasing", "cutout", "flip", "shift")

_TYPES = get_type_hints(TrainingSettings)
_CHOICES = choices(TrainingSettings)


def checked(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values with their right types; ValueError names what is no setting or of another type.

    source: where they come from, for the message.
    """
    return {name: _as_type(name, value, source) for name, value in values.items()}


def require_name(name: str, source: str) -> str:
    """The name itself, if there is such a setting."""
    if name not in _TYPES:
        close = difflib.get_close_matches(name, _TYPES, n=3)
        hint = f"; close to it: {', '.join(close)}" if close else f"; settings are {', '.join(sorted(_TYPES))}"
        raise ValueError(f"{source}: {name!r} is no setting{hint}")
    return name


def _as_type(name: str, value: Any, source: str) -> Any:
    accepted = _TYPES[require_name(name, source)]
    kinds = get_args(accepted) if type(None) in get_args(accepted) else (accepted,)
    if type(None) in kinds and (value is None or value == "none"):
        return None
    plain = (str,) if name in _CHOICES else tuple(get_origin(kind) or kind for kind in kinds)
    if list in plain and isinstance(value, list):
        return [_number(name, item, source) for item in value]
    if float in plain and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
        wanted = " or ".join(_WORDS[kind] for kind in plain)
        raise ValueError(f"{source}: {name}={value!r} must be {wanted}")
    return value


def _number(name: str, value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{source}: {name} holds {value!r}, which must be a number")
    return float(value)


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table",
    list: "a list of numbers",
    type(None): "none",
}
