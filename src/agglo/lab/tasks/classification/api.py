"""The functions agglo.lab.evaluate and agglo.lab.finetune."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

# Settings of a training run that decide how a model is built; a model object has them already.
_OF_BUILDING: dict[str, Any] = {"drop_path": 0.0, "global_pool": None, "patch_drop_rates": []}


def evaluate(
    model: nn.Module | str,
    data: str | PathLike[str] | Iterable[tuple[Tensor, Tensor]],
    *,
    images: int | None = None,
    dataset: str | None = None,
    frame: str | None = None,
    batch_size: int = 64,
    workers: int = 2,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure the accuracy and speed of a classifier as it is now: dense, or reduced by `agglo.apply`.

        agglo.apply(model, keep_rate=0.5)
        agglo.lab.evaluate(model, "imagenet")  # {"top1": ..., "top5": ..., "images": ..., "images_per_second": ...}

    The model runs on its own device, with its own dtype.

    Args:
        model: A classifier of timm, transformers, torchvision or open_clip, what `agglo.lab.zero_shot` gives, or any
            module that turns images into logits. Or a name as `agglo evaluate` takes it, with its published weights.
        data: The folder of a data set (docs/evaluate.md lists the layouts), whose images are prepared as the model
            wants them; or batches (images, labels), prepared already: a DataLoader. Labels are classes (B,), or
            0 and 1 for several labels per image (B, classes).
        images: Only so many of a folder, evenly spread.
        dataset: The folder's data set by name, where its files do not show it.
        frame: How images of a folder are resized and cropped: "study" or "model"; see docs/evaluate.md.
        batch_size, workers: Of a folder.
        quiet: Show no progress.

    Returns:
        "top1" and "top5", or "mAP" for several labels per image, in percent; "images"; and "images_per_second" of the
        model alone.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit", num_classes=4), keep_rate=0.5)
    >>> batches = [(torch.rand(2, 3, 160, 160), torch.tensor([0, 3]))]
    >>> sorted(agglo.lab.evaluate(model, batches, quiet=True))
    ['images', 'images_per_second', 'top1']
    """
    from agglo.lab.tasks.classification.data import open_split
    from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
    from agglo.lab.tasks.classification.evaluation import grid
    from agglo.models.opening import ModelSpec, build
    from agglo.utils.progress import progress

    built = _require_module(build(ModelSpec(model, pretrained=True)) if isinstance(model, str) else model)
    prepare: Any = None
    loader: Any = data
    if isinstance(data, (str, PathLike)):
        opened = open_split(dataset, Path(data), "val")
        grid.require_same_classes(built, opened)
        inputs = inputs_for(built, opened.name, frame)
        opened.transform = evaluation_transform(inputs, normalise=False)
        prepare = inputs.normalise
        loader = DataLoader(grid.spread(opened, images), batch_size, num_workers=workers)
    elif images is not None or dataset is not None or frame is not None:
        raise ValueError("images, dataset and frame go with a folder; batches are taken as they are")
    total = len(loader) if hasattr(loader, "__len__") else 0
    with progress(total, "evaluate", every_seconds=10, quiet=quiet or not total) as advance:
        return grid.evaluate(built, loader, prepare=prepare, advance=lambda count: advance(f"{count} images"))


def finetune(
    model: nn.Module | str,
    data: str | PathLike[str],
    output: str | PathLike[str],
    *,
    recipe: str | PathLike[str] = "deit",
    **settings: Any,
) -> dict[str, Any]:
    """Train a classifier, dense or with its tokens reduced, as `agglo finetune` does: crash-safe, on any devices.

        agglo.lab.finetune(model, "birds", "runs/atc50", method="atc", keep_rate=0.5, epochs=10)

    The same call resumes where an earlier one stopped.

    Args:
        model: A classifier of timm, transformers, torchvision or open_clip, which gets a new head where its own is of
            other classes; or a name as `agglo finetune --model` takes it.
        data: The folder of a data set, with a training and a validation split.
        output: The folder of the run.
        recipe: Its name, or the path of a .toml file (docs/finetune.md).
        settings: method, keep_rate (or threshold, schedule) and linkage say how tokens are reduced; without a method
            the dense model is trained. All others are those that `agglo finetune RECIPE --show` lists.

    Returns:
        The best row of the log. The best weights are in output/best; a model that was given as an object has them too,
        with the reduction applied.

    >>> import tempfile, timm
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for place in ("train/red", "train/blue", "val/red", "val/blue"):
    ...     (folder / place).mkdir(parents=True)
    ...     Image.new("RGB", (160, 160), place.partition("/")[2]).save(folder / place / "0.png")
    >>> model = timm.create_model("test_vit", num_classes=2)
    >>> quick = {"epochs": 1, "batch_size": 2, "accumulation": 1, "workers": 0, "warmup_epochs": 0}
    >>> best = agglo.lab.finetune(model, folder, folder / "run", method="atc", keep_rate=0.5, frozen_epochs=0, **quick)
    >>> (folder / "run" / "best" / "model.safetensors").exists(), 0 <= best["best_metric"] <= 100
    (True, True)
    """
    from accelerate.utils import extract_model_from_parallel

    from agglo.lab.tasks.classification.data import detect
    from agglo.lab.tasks.classification.training.settings import RECIPES
    from agglo.lab.tasks.classification.training.trainer import finetune as train
    from agglo.models.checkpoints import read_checkpoint

    folder, run = Path(data), Path(output)
    chosen = {"dataset": detect(folder), **settings} if "dataset" not in settings else dict(settings)
    if isinstance(model, str):
        found, _ = RECIPES.load(str(recipe)).resolve({"model": model, **chosen})
        return train(found, folder, run)
    kind = type(_require_module(model))
    for name in ("model", "checkpoint", "pretrained", "from_scratch", "teacher", *_OF_BUILDING):
        if name in chosen:
            raise ValueError(f"{name}={chosen[name]!r} goes with a model by name; this one is built already")
    of_object = {"model": f"{kind.__module__}.{kind.__qualname__}", "pretrained": True, "from_scratch": False}
    found, _ = RECIPES.load(str(recipe)).resolve({**_OF_BUILDING, **of_object, **chosen})
    best = train(found, folder, run, model)
    # The model gets the best weights, and its own forward back, which mixed precision wraps.
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    model.load_state_dict(read_checkpoint(run / "best" / "model.safetensors"))
    model.eval()
    return best


def _require_module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} must be a torch.nn.Module or a name")
    return model
