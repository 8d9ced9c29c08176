"""The settings of a fine-tuning run, one flat, checked dataclass, and the recipes in `recipes/*.toml`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from agglo.lab.options import Amount, AtLeastOne, Fraction, Whole, option, require_limits
from agglo.lab.tasks.classification.data import Augmentation, dataset_named
from agglo.lab.training import recipes
from agglo.lab.training.settings import CosineSettings, ReductionSettings


@dataclass(frozen=True)
class TrainingSettings(ReductionSettings, Augmentation, CosineSettings):
    """The settings of a fine-tuning run. Numbers of epochs count from the start of training."""

    of_method = (*ReductionSettings.of_method, "distill")
    of_no_method = ("patch_drop_rates",)

    # What is trained
    model: str = option(
        "deit_small_patch16_224",
        "of timm by its name, or of another library: hf:PATH, torchvision:NAME, ...",
    )
    checkpoint: str | None = option(
        None, "starting weights: a file; its head is replaced where the number of classes differs"
    )
    pretrained: bool = option(
        False, "start from the published weights (downloads them), or those of the folder that model names"
    )
    global_pool: str | None = option(None, "what the head reads: token, avg; none is the model's own")
    head_std: float | None = option(None, "deviation of a new head's starting weights; none is the model's own start")
    from_scratch: bool = option(False, "start from random weights")
    dataset: str = option("imagenet", "by name; `agglo finetune --help` lists them")

    # What goes with token reduction
    distill: bool = option(False, "learn from the dense teacher too (DynamicViT)")
    teacher: str | None = option(None, "weights of the teacher; none is the starting weights")

    # Optimisation, where it is not as for every task
    batch_size: AtLeastOne = 256
    lr_batch: AtLeastOne = 1024
    weight_decay: Amount = option(0.05, "not for vectors, biases, position embeddings and class tokens")
    layer_decay: Amount = option(1.0, "rate of each block in proportion to the next one's")
    backbone_lr_scale: Amount = option(
        1.0, "rate of what was trained before in proportion to new modules, head, patch and position embeddings"
    )
    frozen_epochs: Whole = option(0, "epochs in which the backbone stays as it is")

    # Regularisation
    drop_path: Fraction = 0.1
    label_smoothing: Fraction = 0.1
    mixup: Amount = 0.8
    cutmix: Amount = 1.0
    ema_decay: Fraction = 0.99996
    patch_drop_rates: list[float] = option(
        [], "fraction of patches left out of each training image, epoch by epoch; epochs after these see all patches"
    )

    # Augmentation, where it is not as for any data
    repeated_augmentation: AtLeastOne = option(
        3, "times an image comes in one epoch, which sees fewer images then; in runs of several processes"
    )
    in_memory: bool = option(
        False, "keep small images of one size in memory, and shift and mirror whole batches of them"
    )

    # Running
    evaluate_first: bool = True
    evaluation_batch_size: AtLeastOne = 256
    workers: Whole = option(2, "processes that load images")

    def __post_init__(self) -> None:
        require_limits(self)
        self.require_reduction()
        if self.patch_drop_rates and self.method != "none":
            raise ValueError(
                f"patch_drop_rates={self.patch_drop_rates} and method={self.method!r} exclude each other: "
                "--set patch_drop_rates=[] or --method none"
            )
        if any(not 0 <= rate < 1 for rate in self.patch_drop_rates):
            raise ValueError(f"patch_drop_rates={self.patch_drop_rates} must lie in 0 to 1, without 1")
        if self.in_memory and (self.randaugment or self.colour_jitter or self.erasing or self.cutout):
            raise ValueError("in_memory=true goes without randaugment, colour_jitter, erasing and cutout")
        weights = {name: getattr(self, name) for name in ("checkpoint", "pretrained", "from_scratch")}
        given = [f"{name}={value!r}" for name, value in weights.items() if value]
        if len(given) != 1:
            problem = f"{' and '.join(given)} exclude each other" if given else "no starting weights"
            raise ValueError(f"{problem}: give one of checkpoint=F, pretrained=true and from_scratch=true")
        self.require_rates()


# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"workers", "checkpoint_minutes", "tracker", "evaluation_batch_size", "from_scratch"})


RECIPES = recipes.Recipes(
    TrainingSettings,
    "agglo.lab.tasks.classification.training",
    of_data=lambda values: asdict(dataset_named(values["dataset"]).augmentation),
)
