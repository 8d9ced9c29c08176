"""Made-up data in Fashion-MNIST's format, and a smaller model than the embedded one that trains in a second."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer

from agglo.embedded import classifier as embedded
from agglo.lab.tasks.classification.training.settings import TrainingSettings
from agglo.utils import files as checkpoints


@register_model
def agglo_test_vit(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """The embedded model with 4 blocks and 7 x 7 patches."""
    return embedded.agglo_fashion_vit(pretrained, depth=4, patch_size=4, **options)


def write_fashion(root: Path, n_train: int = 48, n_validation: int = 21) -> Path:
    """The four idx files; each class has a bright row of its own."""
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for prefix, n in (("train", n_train), ("t10k", n_validation)):
        labels = np.arange(n, dtype=np.uint8) % 10
        images = random.integers(0, 100, (n, 28, 28), dtype=np.uint8)
        images[np.arange(n), 2 * labels + 4] = 255
        head = bytes((0, 0, 8, 3)) + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (root / f"{prefix}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(
            bytes((0, 0, 8, 1)) + n.to_bytes(4, "big") + labels.tobytes()
        )
    return root


def quick(**changes: Any) -> TrainingSettings:
    """Two epochs of three steps that draw from every source of randomness there is, with a checkpoint at each step."""
    what = {"model": "agglo_test_vit", "from_scratch": True, "dataset": "fashion-mnist", "in_memory": True}
    how = {"epochs": 2, "batch_size": 16, "lr_batch": 16, "lr": 2e-3, "warmup_epochs": 1.0, "clip_grad": 1.0}
    # Erasing would seed for every image and so hide what else does not.
    random: dict[str, Any] = {
        "mixup": 0.8,
        "cutmix": 1.0,
        "drop_path": 0.2,
        "shift": 2,
        "erasing": 0.0,
        "randaugment": None,
    }
    random["patch_drop_rates"] = [0.75, 0.75]
    kept = {"checkpoint_minutes": 0.0, "evaluation_batch_size": 8, "evaluate_first": False, "ema_decay": 0.9}
    values: dict[str, Any] = {**what, **how, **random, **kept, "workers": 0, **changes}
    return TrainingSettings(**values)


def plain(**changes: Any) -> TrainingSettings:
    """As quick, but nothing is drawn except the order of the images, and nothing is averaged."""
    still = {"mixup": 0.0, "cutmix": 0.0, "drop_path": 0.0, "erasing": 0.0, "patch_drop_rates": [], "shift": 0}
    return quick(**{**still, "flip": 0.0, "ema_decay": 0.0, "clip_grad": 0.0, "checkpoint_minutes": 60.0, **changes})


def last(output: Path) -> dict[str, Any]:
    """Where a run stands."""
    state = checkpoints.load_state(output / "last" / "state.pt")
    assert state is not None
    return state


def log(output: Path) -> list[dict[str, str]]:
    """The rows of a run's log."""
    with (output / "log.csv").open(encoding="utf-8") as rows:
        return list(csv.DictReader(rows))
