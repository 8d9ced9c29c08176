"""Images and their groups under several reductions of one model: on one sheet, or as an animation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agglo.drawing.groups import Ints, as_pixels, count_groups, draw_groups, enlarged, grid_of, stages_of, tokens
from agglo.drawing.sheet import Panel, Row, compose
from agglo.embedded import classifier as embedded
from agglo.hosts.common.base import Layout
from agglo.hosts.registry import find_tower
from agglo.lab.data.image_files import open_image
from agglo.lab.drawing.animation import Cut, counts_between, dissolve
from agglo.lab.evaluation.configs import Configs
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation.grid import prompted
from agglo.methods import Method
from agglo.models.checkpoints import Checkpoint, load_method, split_method
from agglo.models.libraries import class_names, split_name
from agglo.models.opening import ModelSpec, build
from agglo.models.outputs import features_in
from agglo.patch import apply, remove, trace

if TYPE_CHECKING:
    from PIL.Image import Image

FEWEST = 12  # tokens at the end of an animation
_STEPS = 18


def visualize(spec: ModelSpec, images: Sequence[Path], configs: Configs, **how: Any) -> Image:
    """Draw a sheet with one row for every image file; `how` as for `draw_configs`."""
    opened = [open_image(path) for path in images]
    checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
    model = build(prompted(spec), checkpoint)
    inputs, seen = prepared(model, opened, dataset_of(spec))
    how |= {"names": [path.name for path in images], "classes": class_names(model)}
    learned = None if checkpoint is None else checkpoint.method
    return draw_configs(model, inputs, seen, configs, learned=learned, **how)


def dataset_of(spec: ModelSpec) -> str | None:
    """Return the data set that a model is made for, whose images are prepared in a way of their own; None is any."""
    return "fashion-mnist" if split_name(spec.name)[1] == embedded.NAME else None


def prepared(model: Any, images: Sequence[Image], dataset: str | None = None) -> tuple[Tensor, Tensor]:
    """Return images as the model takes them, (B, C, H, W), and the same before normalisation, (B, 3, H, W) bytes."""
    wanted = inputs_for(model, dataset)
    prepare = evaluation_transform(wanted, normalise=False)
    # Pixels stay bytes until they are normalised, as in an evaluation: the model sees the same numbers.
    pixels = torch.stack([torch.as_tensor(prepare(image)) for image in images])
    return wanted.normalise(pixels), pixels.expand(-1, 3, -1, -1)


def draw_configs(
    model: Any,
    inputs: Tensor,
    images: Tensor,
    configs: Configs,
    *,
    names: Sequence[str],
    classes: Sequence[str] | None = None,
    after: int | None = None,
    scale: int = 2,
    learned: Mapping[str, Tensor] | None = None,
    every_stage: bool | None = None,
) -> Image:
    """Draw one row for every image: the image, then one panel per reduction with its groups after the last stage.

    Captions are the model's predictions, dense and reduced.

    Args:
        model: The model, without a reduction.
        inputs: Images as the model takes them, (B, C, H, W).
        images: The same images to draw on, (B, 3, H, W).
        classes: Names of the classes; None draws no predictions.
        after: Draw the stages up to this block only.
        learned: Weights of the methods that learn; without them such a method is drawn untrained, with a warning.
        every_stage: Draw one row per reduction, with its groups after every stage; None does so if there is only one.
    """
    every_stage = len(configs) == 1 if every_stage is None else every_stage
    pixels = as_pixels(images)
    with torch.inference_mode():
        answers = _answers(features_in(remove(model)(inputs)), classes)
    reduced = []
    for config in configs:
        apply(model, config)
        if learned and split_method(model.state_dict())[1]:
            load_method(model, learned, "the checkpoint")
        elif split_method(model.state_dict())[1]:
            text = f"{config.method} learns what to keep, and there are no weights of it: what is drawn is chance"
            warnings.warn(f"{text}; give a checkpoint that was fine-tuned with it", stacklevel=1)
        with torch.inference_mode(), trace(model) as record:
            logits = features_in(model(inputs))
        if after is not None and after < (first := min(record.groupings)):
            raise ValueError(f"after={after}: {config} reduces at block {first} for the first time")
        stages = [
            {block: labels for block, labels in of.items() if after is None or block <= after}
            for of in stages_of(record, pixels, _layout(model).grid)
        ]
        reduced.append((stages, _answers(logits, classes)))
    remove(model)
    has_one_budget = len({config.budget for config in configs}) == 1
    sheet = []
    for index, image in enumerate(pixels):
        own = Panel(enlarged(image, scale), "input", answers[index] and f"dense: {answers[index]}")
        panels = [own]
        for (config, name), (stages, reduced_answers) in zip(configs.items(), reduced, strict=True):
            groups, answer = stages[index], reduced_answers[index]
            drawn = {block: draw_groups(image, labels, scale=scale) for block, labels in groups.items()}
            counts = {block: tokens(count_groups(labels)) for block, labels in groups.items()}
            last = max(groups)
            if every_stage:
                row = [Panel(drawn[n], f"block {n}: {counts[n]}", answer if n == last else "") for n in groups]
                sheet.append(Row([own, *row], f"{names[index]}: {name}, {config.budget}"))
            else:
                title = name if has_one_budget else f"{name}, {config.budget}"
                panels.append(Panel(drawn[last], title, ": ".join(filter(None, (counts[last], answer)))))
        if not every_stage:
            sheet.append(Row(panels, names[index]))
    return compose(sheet)


def _answers(logits: Tensor, classes: Sequence[str] | None) -> list[str]:
    """Return the top-1 class of each image and its probability, such as "palace, 23%"; empty without class names."""
    if classes is None:
        return [""] * len(logits)
    confidences, best = logits.float().softmax(-1).max(-1)
    return [f"{classes[int(index)]}, {float(part):.0%}" for part, index in zip(confidences, best, strict=True)]


def animate(
    spec: ModelSpec,
    image: Path,
    method: Method,
    *,
    block: int | None = None,
    keep_rate: float | None = None,
    scale: int = 2,
) -> list[Image]:
    """Return frames of one image dissolving into its groups: cuts of the tree over its tokens at one block.

    Every frame is a run of the model that merges at this block only, so that all frames compare the same tokens.

    Args:
        block: None is the one at a quarter of the depth, where reduction usually begins.
        keep_rate: Fraction of tokens at the end; None ends with FEWEST tokens.
    """
    opened = open_image(image)
    model: Any = build(prompted(spec))
    classes = class_names(model)
    inputs, seen = prepared(model, [opened], dataset_of(spec))
    pixels = as_pixels(seen)
    layout = _layout(model)
    n_patches = layout.patches
    fewest = FEWEST if keep_rate is None else int(n_patches * keep_rate)
    block = layout.depth // 4 if block is None else block
    with torch.inference_mode():
        grid = grid_of(n_patches, pixels.shape[1:3]) if layout.grid is None else layout.grid
        alone: Ints = torch.arange(n_patches).view(grid).numpy()
        first = Cut(alone, tokens(n_patches), _answers(features_in(model(inputs)), classes)[0])
        cuts = []
        for count in counts_between(n_patches, fewest, _STEPS):
            apply(model, method, schedule=[0] * block + [n_patches - count])
            with trace(model) as record:
                logits = features_in(model(inputs))
            labels = stages_of(record, pixels, layout.grid)[0][block]
            cuts.append(Cut(labels, tokens(count_groups(labels)), _answers(logits, classes)[0]))
    return dissolve(pixels[0], cuts, first=first, scale=scale)


def _layout(model: Any) -> Layout:
    module, host = find_tower(model)
    return host.layout(module)
