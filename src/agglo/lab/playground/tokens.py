"""One image through a classifier, agglo's or the user's own: dense, then under several reductions, each timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from agglo.clustering import linkage
from agglo.config import ReductionConfig
from agglo.drawing.groups import Pixels, as_pixels, count_groups, stages_of
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.playground.settings import Result, dense_size
from agglo.lab.tasks.classification.evaluation.figures import dataset_of, prepared
from agglo.lab.tasks.classification.evaluation.grid import prompted
from agglo.methods import Outcome, View
from agglo.methods.atc import ATC
from agglo.models.libraries import class_names
from agglo.models.opening import ModelSpec, build
from agglo.models.outputs import logits_in
from agglo.patch import apply, remove, report, trace
from agglo.schedule import Counts
from agglo.utils.timing import timed_pass

TOP = 5


@dataclass(frozen=True)
class Classifier:
    """A model with the names of its classes."""

    model: nn.Module  # takes inputs (B, C, H, W) and returns logits, or an output that holds them
    classes: Sequence[str] | None  # None for a model without a head
    dataset: str | None  # whose images the model is made for, which decides how an image is cropped; None is any

    def prepare(self, image: Image) -> tuple[Tensor, Tensor]:
        """Return an image as the model takes it, (1, C, H, W), and what it sees of it, (1, 3, H, W) bytes."""
        inputs, seen = prepared(self.model, [image], self.dataset)
        return inputs.to(next(self.model.parameters()).device), seen

    def top(self, output: Any) -> list[tuple[str, float]]:
        """Return the first classes of a model's output, with their probabilities."""
        if self.classes is None:
            return []
        probabilities = logits_in(output)[0].float().softmax(-1)
        best = torch.topk(probabilities, min(TOP, len(probabilities)))
        return [(self.classes[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def open_classifier(spec: ModelSpec, device: str = "cpu") -> Classifier:
    """Open a model as every command names it. Prompts without class names are of ImageNet's classes."""
    model = build(prompted(spec)).to(device)
    return Classifier(model, class_names(model), dataset_of(spec))


@dataclass(frozen=True, kw_only=True)
class Classified(Result):
    """A pass of a classifier."""

    top: list[tuple[str, float]] = field(default_factory=list)  # classes and probabilities; empty without a head


@dataclass(frozen=True)
class Tree:
    """The tree over an image's tokens where they are first reduced."""

    merges: Tensor  # (N - 1, 4), as `agglo.linkage` gives it
    groups: int  # left after the reduction
    block: int
    linkage: str
    is_method: bool  # whether the groups are a cut of this tree


@dataclass(frozen=True)
class Compared:
    """The dense model and its reductions on one image."""

    pixels: Pixels  # (H, W, 3), what the model saw
    tokens: int  # patch tokens of the dense model
    dense: Classified
    sides: list[Classified]
    tree: Tree | None

    @property
    def passes(self) -> list[Classified]:
        """Every pass that ran, the dense one first."""
        return [self.dense, *(side for side in self.sides if side.refused is None)]


def compare(classifier: Classifier, image: Image, configs: Sequence[ReductionConfig]) -> Compared:
    """Run the dense model and every reduction of it on one image. The model is dense afterwards."""
    inputs, seen = classifier.prepare(image)
    pixels = as_pixels(seen)
    tokens, gflops = dense_size(classifier.model)
    try:
        seconds, output = timed_pass(classifier.model, inputs)
        dense = Classified(config=None, seconds=seconds, gflops=gflops, top=classifier.top(output))
        found = [_reduced(classifier, inputs, pixels, config) for config in configs]
    finally:
        remove(classifier.model)
    # Where a side is ATC the tree is what it cut; the tree of others is there to compare.
    trees = sorted((tree for _, tree in found if tree is not None), key=lambda tree: not tree.is_method)
    return Compared(pixels[0], tokens, dense, [side for side, _ in found], trees[0] if trees else None)


def _reduced(
    classifier: Classifier, inputs: Tensor, pixels: Pixels, config: ReductionConfig
) -> tuple[Classified, Tree | None]:
    model: Any = classifier.model
    views: list[tuple[Tensor, str, Tensor | None]] = []

    def note_first(view: View) -> Outcome:
        """Note what ATC compares, or would compare, at the first reduction."""
        if not views:
            own = method if isinstance(method, ATC) else ATC(features="tokens" if view.keys is None else "keys")
            views.append(own.compared(view))
        return reduce(view)

    method: Any = config.create_method()
    reduce, method.reduce = method.reduce, note_first
    try:
        apply(model, config)
        seconds, output = timed_pass(model, inputs)
        # Watching takes time too: not of the pass that is timed, since the dense model runs unwatched as well.
        others: dict[str, Any] = {name: value for name, value in config.given().items() if name not in config.options}
        apply(model, method, **others)
        with torch.inference_mode(), trace(model) as record:
            model(inputs)
        stages = stages_of(record, pixels)[0]
        counts = [count_groups(labels) for labels in stages.values()]
        found: Any = report(model)
        if found.gflops_after is None and stages:
            # What a threshold leaves is known after the pass: a schedule of the same counts costs the same.
            found = report(apply(model, config.method, schedule=Counts(counts, blocks=list(stages))))
        gflops = found.gflops_after or found.gflops_before
    except (ValueError, UnsupportedModelError) as error:
        return Classified(config=config, refused=str(error)), None
    top = classifier.top(output)
    side = Classified(config=config, seconds=seconds, gflops=gflops, counts=counts, stages=stages, top=top)
    if not views or not stages:
        return side, None
    features, how, weights = views[0]
    merges = linkage(features[:1].float(), how, weights=None if weights is None else weights[:1], check=False)
    return side, Tree(merges[0].cpu(), counts[0], min(stages), how, isinstance(method, ATC))
