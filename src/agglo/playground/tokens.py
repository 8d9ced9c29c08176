"""One picture through a classifier: dense, then under several reductions, all timed in this very call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agglo.clustering import linkage
from agglo.drawing.groups import Ints, Pixels, as_pixels, count_groups, stages_of
from agglo.experiments.evaluation.turns import timed_pass
from agglo.experiments.outputs import logits_in
from agglo.hosts.swap import UnsupportedModelError
from agglo.methods import Method, Outcome, View, create
from agglo.methods.atc import ATC
from agglo.methods.helpers.watching import Reduce, watched
from agglo.patching import apply, reduction, remove, trace
from agglo.playground.classifiers import Classifier
from agglo.playground.settings import Chosen
from agglo.schedule import Counts

if TYPE_CHECKING:
    from PIL.Image import Image

# Of the arguments of `agglo.apply`, those that are not a method's options.
_NOT_OPTIONS = ("method", "keep_rate", "threshold", "schedule", "blocks", "proportional", "acts", "unread")
TOP = 5


@dataclass(frozen=True)
class Answer:
    """A class, and how sure the model is of it."""

    name: str
    share: float


@dataclass(frozen=True)
class Passed:
    """What one pass took and gave.

    counts: patch tokens after each reduction. gflops: multiply-adds in 1e9; None where nobody counts them.
    top: the first classes; empty for a model without a head.
    """

    title: str
    counts: list[int]
    gflops: float | None
    seconds: float
    top: list[Answer]


@dataclass(frozen=True)
class Reduced(Passed):
    """line: of Python. stages: by block, the group of every patch (h, w) after it."""

    line: str
    stages: dict[int, Ints]


@dataclass(frozen=True)
class Refused:
    """A reduction that cannot be, and why."""

    title: str
    line: str
    reason: str


@dataclass(frozen=True)
class Tree:
    """The tree over a picture's tokens where they are first reduced. merges: (N - 1, 4), as `agglo.linkage` gives it.
    groups: how many are left there. block: where. linkage: of the tree. is_method: whether the groups are its cut."""

    merges: Tensor
    groups: int
    block: int
    linkage: str
    is_method: bool


@dataclass(frozen=True)
class Compared:
    """pixels: (H, W, 3), what the model saw. tokens: patch tokens of the dense model."""

    pixels: Pixels
    tokens: int
    dense: Passed
    sides: list[Reduced | Refused]
    tree: Tree | None


def compare(classifier: Classifier, image: Image, chosen: Sequence[Chosen]) -> Compared:
    """The dense model and every reduction of it, on one picture. The model is dense afterwards."""
    model = classifier.model
    inputs, seen = classifier.prepare(image)
    pixels = as_pixels(seen)
    try:
        tokens, gflops = classifier.size
        remove(model)
        seconds, answer = timed_pass(model, inputs)
        dense = Passed("dense", [tokens], gflops, seconds, _top(classifier, answer))
        found = [_reduced(classifier, inputs, pixels, each) for each in chosen]
    finally:
        remove(model)
    # Where a side is ATC the tree is what it cut; the tree of others is there to compare.
    trees = sorted((tree for _, tree in found if tree is not None), key=lambda tree: not tree.is_method)
    return Compared(pixels[0], tokens, dense, [side for side, _ in found], trees[0] if trees else None)


def _reduced(
    classifier: Classifier, inputs: Tensor, pixels: Pixels, chosen: Chosen
) -> tuple[Reduced | Refused, Tree | None]:
    model: Any = classifier.model
    views: list[tuple[Tensor, str, Tensor | None]] = []
    try:
        method, others = _method(chosen)
        apply(model, method, **others)
        seconds, answer = timed_pass(model, inputs)
        # Looking on takes time too: not of the pass that is timed, since the dense model runs unwatched as well.
        apply(model, watched(method, _noting(method, views)), **others)
        with torch.inference_mode(), trace(model) as record:
            model(inputs)
        stages = stages_of(record, pixels)[0]
        counts = [count_groups(labels) for labels in stages.values()]
        gflops = _gflops(model, chosen, stages, counts)
    except (ValueError, UnsupportedModelError) as error:
        return Refused(chosen.title, chosen.line, str(error)), None
    passed = Reduced(chosen.title, counts, gflops, seconds, _top(classifier, answer), chosen.line, stages)
    if not views or not stages:
        return passed, None
    features, how, weights = views[0]
    merges = linkage(features[0].float(), how, weights=None if weights is None else weights[0], check=False)
    return passed, Tree(merges.cpu(), counts[0], min(stages), how, isinstance(method, ATC))


def _method(chosen: Chosen) -> tuple[Method, dict[str, Any]]:
    """The method itself, and the other arguments of `agglo.apply`."""
    options = {name: value for name, value in chosen.arguments.items() if name not in _NOT_OPTIONS}
    others = {name: value for name, value in chosen.arguments.items() if name in _NOT_OPTIONS and name != "method"}
    return create(chosen.arguments["method"], **options), others


def _noting(method: Method, views: list[tuple[Tensor, str, Tensor | None]]) -> Any:
    """Notes what ATC compares, or would compare, at the first reduction."""

    def around(reduce: Reduce, view: View) -> Outcome:
        if not views:
            own = method if isinstance(method, ATC) else ATC(features="tokens" if view.keys is None else "keys")
            views.append(own.compared(view))
        return reduce(view)

    return around


def _gflops(model: Any, chosen: Chosen, stages: dict[int, Ints], counts: list[int]) -> float | None:
    """Of the pass. What a threshold leaves is known after it: a schedule of the same counts costs the same."""
    found = reduction(model)
    if found is None or found.gflops_after is not None or not stages:
        return None if found is None else found.gflops_after or found.gflops_before
    apply(model, chosen.arguments["method"], schedule=Counts(counts, blocks=list(stages)))
    found = reduction(model)
    return None if found is None else found.gflops_after


def _top(classifier: Classifier, answer: Any) -> list[Answer]:
    if classifier.classes is None:
        return []
    shares = logits_in(answer)[0].float().softmax(-1)
    best = torch.topk(shares, min(TOP, len(shares)))
    names = classifier.classes
    return [
        Answer(names[index], share) for share, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
