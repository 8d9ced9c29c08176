"""What `agglo.heal` gives on two real classifiers: which parameters, loss, learning rate and how many images.

Two fixed folds of the images: healed on one and on further photos, judged on the other, both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from hashlib import blake2b
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import agglo
from agglo.lab.paper import compare
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, StudyCell
from agglo.lab.tasks.classification.data.formats import imagenet_classes
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.models.opening import ModelSpec, build
from agglo.tuning.images import Batch
from agglo.tuning.result import Quality
from agglo.tuning.subject import compared
from agglo.utils.files import load_state, save_state
from agglo.utils.tables import Column, Table
from studies import study

MODELS = ("deit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k_ft_in1k")
DATA = Need("data", "imagenet", "ImageNet's validation images in class folders")
PHOTOS = Need("data", "photos", "further photos in folders of any name")
_BETTER = "atc:importance=class,mean=preserve_norm,features=tokens,last_block=class_token,schedule=(counts:{})"
CONFIGS = {
    0.5: _BETTER.format("144,107,79,58,43,32,23,blocks=[3,4,5,6,7,8,9]"),
    0.35: _BETTER.format("146,109,81,60,45,33,25,18,14,blocks=[1,2,3,4,5,6,7,8,9]"),
}


@dataclass(frozen=True)
class Trial:
    """One way to heal. Four minutes of one core, but for more steps."""

    parameters: str = "norms"
    lr: float = 2e-3
    images: int = 2000
    loss: str = "logits"
    batch_size: int = 16
    steps: int = 256

    def __str__(self) -> str:
        how = f"{self.steps} steps of {self.batch_size} of {self.images} images"
        return f"{self.parameters} by {self.loss}, lr {self.lr:g}, {how}"


BASE, NOT_HEALED = Trial(), "not healed"
_AT_HALF = (
    *(replace(BASE, parameters=parameters) for parameters in ("norms", "all", "biases")),
    *(replace(BASE, lr=lr) for lr in (1e-3, 4e-3)),
    *(replace(BASE, steps=1024, parameters=parameters) for parameters in ("norms", "all")),
    replace(BASE, loss="logits and class token"),
    *(replace(BASE, images=images) for images in (200, 500)),
    replace(BASE, batch_size=32, steps=128),
)
_AT_A_THIRD = tuple(replace(BASE, parameters=p, steps=steps) for steps in (256, 1024) for p in ("norms", "all"))
TRIALS = {0.5: _AT_HALF, 0.35: _AT_A_THIRD}


def fold_of(name: str) -> int:
    """Return the fold, 0 or 1, that an image of this file name is in, for good."""
    return blake2b(name.encode(), digest_size=1).digest()[0] % 2


def _axes(scale: Mapping[float, Sequence[Trial]], settings: Settings) -> Iterator[StudyCell]:
    for budget, trials in scale.items():
        for trial in (NOT_HEALED, *map(str, trials)):
            for model in MODELS:
                needs = (DATA, PHOTOS, Need("weights", model, f"the weights of {model}"))
                for fold in (0, 1):
                    yield StudyCell({"model": model, "gflops": budget, "trial": trial, "judged_on": fold}, needs)


def _run(scale: Mapping[float, Sequence[Trial]], settings: Settings) -> RunCell:
    root, folder = settings.data[DATA.name], settings.run_folder("healing")
    files = sorted(path for path in root.glob("*/*") if path.is_file())
    photos = sorted(settings.data[PHOTOS.name].glob("*/*.jpg"))
    classes = {name: number for number, name in enumerate(imagenet_classes())}
    named = {str(trial): trial for trials in scale.values() for trial in trials}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        name, fold, config = about["model"], about["judged_on"], agglo.ReductionConfig.parse(CONFIGS[about["gflops"]])
        model = build(ModelSpec(name, settings.weights[name]))
        inputs = inputs_for(model, "imagenet")
        judged = [path for path in files if fold_of(path.name) == fold]
        prepare = evaluation_transform(inputs, normalise=False)
        pixels = torch.stack([prepare(_opened(path)) for path in judged])
        batch = Batch(pixels, torch.tensor([classes[path.parent.name] for path in judged]), len(judged))
        kept = folder / f"{name}-{fold}.pt"
        state = load_state(kept) or {"dense": _logits(model, pixels, inputs)}
        save_state(kept, state)
        agglo.apply(model, config)
        found: dict[str, Any] = {}
        if about["trial"] in named:
            trial = named[about["trial"]]
            others = [path for path in files if fold_of(path.name) != fold] + photos
            count = min(trial.images, len(others))
            healed = agglo.heal(
                model,
                [others[number * len(others) // count] for number in range(count)],
                parameters=trial.parameters,  # type: ignore[arg-type]
                lr=trial.lr,
                batch_size=trial.batch_size,
                steps=trial.steps,
                output=None if trial.loss == "logits" else with_class_token,
                inputs=inputs,
                autocast=torch.bfloat16,
                checkpoint=folder / f"{'-'.join(map(str, about.values()))}.pt".replace(" ", ""),
            )
            found = {"minutes": healed.minutes, "steps": healed.steps, "curve": healed.curve}
            found |= {"before": asdict(healed.before), "after": asdict(healed.after), "error": healed.error}
        quality, _ = compared("kl", batch, state["dense"], _logits(model, pixels, inputs))
        cost = agglo.report(model)
        ratio = cost.gflops_after / cost.gflops_before
        return {"quality": asdict(quality), "cost": ratio, "config": config.to_dict(), **found}

    return run


def with_class_token(model: Any, images: Tensor) -> list[Tensor]:
    """Return the logits and what the head reads of an image."""
    seen: list[Tensor] = []
    with model.head.register_forward_pre_hook(lambda module, given: seen.append(given[0])):
        logits = model(images)
    return [logits, *seen]


def _opened(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


@torch.inference_mode()
def _logits(model: nn.Module, pixels: Tensor, inputs: Any) -> Tensor:
    return torch.cat([model(inputs.normalise(part)) for part in pixels.split(50)])


def _table(results: Sequence[Result], scale: Mapping[float, Sequence[Trial]]) -> list[Section]:
    sections = []
    for (budget,), here in compare.grouped(results, "gflops").items():
        columns = [Column("healed", left=True)]
        columns += [
            Column(f"{model.partition('_patch16')[0]}, {what}") for model in MODELS for what in ("KL", "points lost")
        ]
        rows = []
        for (trial,), of_trial in compare.grouped(here, "trial").items():
            row: list[Any] = [trial]
            for model in MODELS:
                parts = [Quality(**result["quality"]) for result in of_trial if result["model"] == model]
                pooled = reduce(add, parts) if len(parts) == 2 else None  # both folds
                row.append(pooled and f"{pooled.distance:.4f} +- {pooled.distance_error:.4f}")
                row.append(pooled and str(pooled.drop))
            rows.append(row)
        text = (
            "Healed on one fold of the images and further photos, judged on the other fold, both ways; +- one standard "
            "error over images, paired with the dense model's answers."
        )
        sections.append(Section(f"{budget:g} of the dense model's GFLOPs", Table(columns, rows), text))
    return sections


ITEMS = (
    study(
        name="healing",
        about="What healing without labels gives back of what a reduction costs, on two classifiers",
        full=TRIALS,
        miniature=None,
        axes=_axes,
        run=_run,
        table=_table,
    ),
)
