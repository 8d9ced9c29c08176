"""Photographs and their groups under several reductions of one model: on one sheet, or dissolving in an animation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agglo.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.drawing.animation import Cut, counts_between, dissolve
from agglo.drawing.groups import Ints, as_pixels, count_groups, draw_groups, enlarged, grid_of, stages_of, tokens
from agglo.drawing.sheet import Panel, Row, compose
from agglo.embedded import classifier as embedded
from agglo.experiments.checkpoints import Checkpoint, load_method, split_method
from agglo.experiments.image_files import open_image
from agglo.experiments.imagenet import imagenet_names
from agglo.experiments.libraries import class_names, split_name
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.outputs import features_in
from agglo.experiments.variants import Variant
from agglo.hosts.registry import find_tower
from agglo.hosts.vit.base import Layout
from agglo.methods import Method
from agglo.patching import apply, remove, trace

if TYPE_CHECKING:
    from PIL.Image import Image

FEWEST = 12  # tokens at the end of an animation
_STEPS = 18


def visualize(
    spec: ModelSpec,
    images: Sequence[Path],
    variants: Sequence[Variant],
    *,
    after: int | None = None,
    scale: int = 2,
    every_stage: bool | None = None,
) -> Image:
    """A sheet with one row for every image; see `draw_variants`."""
    opened = [open_image(path) for path in images]
    checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
    model = build(with_class_names(spec), checkpoint)
    inputs, pictures = prepared(model, opened, dataset_of(spec))
    return draw_variants(
        model,
        inputs,
        pictures,
        variants,
        names=[path.name for path in images],
        classes=class_names(model),
        after=after,
        scale=scale,
        learned=None if checkpoint is None else checkpoint.method,
        every_stage=every_stage,
    )


def with_class_names(spec: ModelSpec) -> ModelSpec:
    """Without class names, prompts are of ImageNet's classes."""
    if spec.prompts is None or spec.prompts.class_names is not None:
        return spec
    return replace(spec, prompts=replace(spec.prompts, class_names=tuple(imagenet_names())))


def dataset_of(spec: ModelSpec) -> str | None:
    """The data set whose pictures a model is made for, where its name says that: an evaluation prepares them in its
    way, and so must whoever shows the model a picture. None is any picture."""
    return "fashion-mnist" if split_name(spec.name)[1] == embedded.NAME else None


def prepared(model: Any, images: Sequence[Image], dataset: str | None = None) -> tuple[Tensor, Tensor]:
    """Images as the model takes them, (B, C, H, W), and what it then sees of them, (B, 3, H, W) bytes.

    dataset: see `inputs_for`.
    """
    wanted = inputs_for(model, dataset)
    prepare = evaluation_transform(wanted, normalise=False)
    # Pixels stay bytes until they are normalised, as in an evaluation: the model sees the same numbers.
    pixels = torch.stack([torch.as_tensor(prepare(image)) for image in images])
    return Normalise(wanted.mean, wanted.std)(pixels), pixels.expand(-1, 3, -1, -1)


def draw_variants(
    model: Any,
    inputs: Tensor,
    pictures: Tensor,
    variants: Sequence[Variant],
    *,
    names: Sequence[str],
    classes: Sequence[str] | None = None,
    after: int | None = None,
    scale: int = 2,
    learned: Mapping[str, Tensor] | None = None,
    every_stage: bool | None = None,
) -> Image:
    """One row for every input (B, C, H, W) of a built model, from the pictures (B, 3, H, W) they were made of.

    A row begins with the picture and goes on with one panel per variant, its groups after the last stage. With every
    stage, each variant has a row of its own. Below stand the model's first answers, dense and reduced.

    names: of the images. classes: what answers are called. after: the stages up to this block only.
    learned: weights of the methods that learn; without them such a method is drawn untrained, with a warning.
    every_stage: None is for one variant.
    """
    every_stage = len(variants) == 1 if every_stage is None else every_stage
    pixels = as_pixels(pictures)
    with torch.inference_mode():
        answers = Answers(features_in(remove(model)(inputs)), classes)
    reduced = [_run(model, inputs, pixels, variant, classes, after, learned) for variant in variants]
    remove(model)
    sheet = []
    for index, picture in enumerate(pixels):
        own = Panel(enlarged(picture, scale), "input", answers.of(index, "dense"))
        if every_stage:
            for variant, seen in zip(variants, reduced, strict=True):
                panels = [own, *_stages(seen, index, picture, scale)]
                sheet.append(Row(panels, f"{names[index]}: {_full_name(variant)}"))
            continue
        panels = [own]
        for variant, seen in zip(variants, reduced, strict=True):
            labels = list(seen.stages[index].values())[-1]
            caption = ": ".join(filter(None, (tokens(count_groups(labels)), seen.answers.of(index))))
            panels.append(Panel(draw_groups(picture, labels, scale=scale), _name(variant, variants), caption))
        sheet.append(Row(panels, names[index]))
    return compose(sheet)


def _stages(seen: _Reduced, index: int, picture: Any, scale: int) -> list[Panel]:
    """The groups of one image after every stage, with the answer below the last."""
    stages = seen.stages[index]
    return [
        Panel(
            draw_groups(picture, labels, scale=scale),
            f"block {block}: {tokens(count_groups(labels))}",
            seen.answers.of(index) if block == max(stages) else "",
        )
        for block, labels in stages.items()
    ]


@dataclass(frozen=True)
class _Reduced:
    """What one variant did to all images: groups by block for each, and what the model then said."""

    stages: list[dict[int, Ints]]
    answers: Answers


def _run(
    model: Any,
    inputs: Tensor,
    pixels: Any,
    variant: Variant,
    classes: Sequence[str] | None,
    after: int | None,
    learned: Mapping[str, Tensor] | None,
) -> _Reduced:
    variant.apply(model)
    _load_learned(model, variant, learned)
    with torch.inference_mode(), trace(model) as record:
        logits = features_in(model(inputs))
    stages = stages_of(record, pixels, _layout(model).grid)
    if after is not None:
        stages = [{block: labels for block, labels in of.items() if block <= after} for of in stages]
        if not all(stages):
            first = min(record.groupings)
            raise ValueError(f"after={after}: {_full_name(variant)} reduces at block {first} for the first time")
    return _Reduced(stages, Answers(logits, classes))


def _load_learned(model: Any, variant: Variant, learned: Mapping[str, Tensor] | None) -> None:
    if not split_method(model.state_dict())[1]:
        return
    if learned:
        load_method(model, learned, "the checkpoint")
    else:
        warnings.warn(
            f"{variant.name} learns what to keep, and there are no weights of it: what is drawn is chance; "
            "give a checkpoint that was fine-tuned with it",
            stacklevel=1,
        )


@dataclass(frozen=True)
class Answers:
    """What a classifier said about a batch. logits: (B, classes), or features of a model without a head, which say
    nothing."""

    logits: Tensor
    classes: Sequence[str] | None

    def of(self, index: int, who: str = "") -> str:
        """The first answer to one image, and how sure: "palace, 23 %"."""
        if self.classes is None:
            return ""
        confidence, best = self.logits[index].float().softmax(-1).max(-1)
        answer = f"{self.classes[int(best)]}, {float(confidence):.0%}"
        return f"{who}: {answer}" if who else answer


def animate(
    spec: ModelSpec,
    image: Path,
    method: Method,
    *,
    block: int | None = None,
    keep_rate: float | None = None,
    scale: int = 2,
) -> list[Image]:
    """One image dissolving into its groups: cuts of the tree over its tokens at one block.

    Every frame is a run of the model that merges at this block only, so that all frames compare the same tokens; the
    caption is its answer.

    block: None is the one at a quarter of the depth, where reduction usually begins.
    keep_rate: where it ends; None is at FEWEST tokens.
    """
    opened = open_image(image)
    model: Any = build(with_class_names(spec))
    classes = class_names(model)
    inputs, pictures = prepared(model, [opened], dataset_of(spec))
    pixels = as_pixels(pictures)
    layout = _layout(model)
    n_patches = layout.patches
    fewest = FEWEST if keep_rate is None else int(n_patches * keep_rate)
    block = layout.depth // 4 if block is None else block
    with torch.inference_mode():
        first = Cut(_each_alone(layout, pixels), tokens(n_patches), Answers(features_in(model(inputs)), classes).of(0))
        cuts = []
        for count in counts_between(n_patches, fewest, _STEPS):
            apply(model, method, schedule=[0] * block + [n_patches - count])
            with trace(model) as record:
                logits = features_in(model(inputs))
            labels = stages_of(record, pixels, layout.grid)[0][block]
            cuts.append(Cut(labels, tokens(count_groups(labels)), Answers(logits, classes).of(0)))
    return dissolve(pixels[0], cuts, first=first, scale=scale)


def _layout(model: Any) -> Layout:
    module, host = find_tower(model)
    return host.layout(module)


def _each_alone(layout: Layout, pixels: Any) -> Ints:
    grid = grid_of(layout.patches, pixels.shape[1:3]) if layout.grid is None else layout.grid
    labels: Ints = torch.arange(layout.patches).view(grid).numpy()
    return labels


def _full_name(variant: Variant) -> str:
    return f"{variant.name}, {variant.budget_text}"


def _name(variant: Variant, variants: Sequence[Variant]) -> str:
    """The variant's name, with its budget where that is not the same for all."""
    alike = len({other.budget_text for other in variants}) == 1
    return variant.name if alike else _full_name(variant)
