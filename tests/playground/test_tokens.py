"""What the page computes of a picture is what the library gives, and the line of Python gives the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.spatial.distance import pdist

import agglo
from agglo import tracing
from agglo.drawing.groups import patch_labels
from agglo.experiments.evaluation.turns import timed_pass
from agglo.experiments.models import build
from agglo.methods.helpers.features import patch_features
from agglo.methods.helpers.watching import watched
from agglo.playground import tokens
from agglo.playground.classifiers import EMBEDDED, Classifier
from agglo.playground.dynamic import threshold
from agglo.playground.examples import EASY, HARD, picture
from agglo.playground.fronts import Fronts
from agglo.playground.settings import Chosen, choose, methods
from agglo.playground.tokens import Compared, Reduced, Refused, compare

BOOT = "example:boot"


def own_model() -> Any:
    """Another copy, that the page does not know of."""
    return build(EMBEDDED)


def by_the_library(classifier: Classifier, image: Image.Image, **arguments: Any) -> tuple[torch.Tensor, Any]:
    """Probabilities, and the trace."""
    inputs, _ = classifier.prepare(image)
    model = agglo.apply(own_model(), **arguments)
    with torch.inference_mode(), agglo.trace(model) as trace:
        return model(inputs).softmax(-1)[0], trace


def one(found: Compared) -> Reduced:
    [side] = found.sides
    assert isinstance(side, Reduced)
    return side


@pytest.mark.parametrize("method", methods())
def test_every_method_gives_what_the_library_gives(classifier: Classifier, method: str) -> None:
    chosen = choose(method, "average", keep_rate=0.6)
    side = one(compare(classifier, picture(BOOT), [chosen]))
    shares, trace = by_the_library(classifier, picture(BOOT), **chosen.arguments)
    labels = {block: of[0] for block, of in patch_labels(trace).items()}
    assert list(side.stages) == list(labels)
    assert all(np.array_equal(side.stages[block].reshape(-1), labels[block]) for block in labels)
    best = shares.topk(5)
    assert [classifier.classes[number] for number in best.indices] == [answer.name for answer in side.top]  # type: ignore[index]
    assert [answer.share for answer in side.top] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_dense_beside_it_and_gflops_are_the_librarys(classifier: Classifier) -> None:
    found = compare(classifier, picture(BOOT), [choose("atc", "single", keep_rate=0.25)])
    model = own_model()
    inputs, _ = classifier.prepare(picture(BOOT))
    with torch.inference_mode():
        dense = model(inputs).softmax(-1)[0].topk(5)
    told = agglo.reduction(agglo.apply(model, "atc", keep_rate=0.25, linkage="single"))
    assert told is not None
    assert (found.dense.gflops, one(found).gflops) == (told.gflops_before, told.gflops_after)
    assert [found.tokens, *one(found).counts] == [196, 49, 12, 3]
    assert [answer.share for answer in found.dense.top] == pytest.approx(dense.values.tolist(), rel=1e-5)
    assert found.dense.seconds > 0 and one(found).seconds > 0


@pytest.mark.parametrize("method", ["atc", "tome"])
def test_the_time_is_of_a_pass_that_nobody_watches(
    classifier: Classifier, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the dense model, and of a reduced one."""
    timed: list[bool] = []  # at every pass that is timed: whether somebody traces
    noted: list[bool] = []  # at every decision that is noted: whether it is timed
    inside = False

    def timing(model: Any, inputs: Any) -> Any:
        nonlocal inside
        timed.append(tracing._any_open)
        inside = True
        try:
            return timed_pass(model, inputs)
        finally:
            inside = False

    def noting(method: Any, around: Any) -> Any:
        return watched(method, lambda reduce, view: noted.append(inside) or around(reduce, view))

    monkeypatch.setattr(tokens, "timed_pass", timing)
    monkeypatch.setattr(tokens, "watched", noting)
    side = one(compare(classifier, picture(BOOT), [choose(method, "average", keep_rate=0.5)]))
    assert side.stages and timed == [False, False] and noted == [False] * len(side.stages)


def test_the_model_is_dense_afterwards(classifier: Classifier) -> None:
    compare(classifier, picture(BOOT), [choose("atc", "average", keep_rate=0.5), choose("tome", "", keep_rate=0.1)])
    assert agglo.reduction(classifier.model) is None


def test_what_a_method_cannot_do_is_said_and_the_other_side_stays(classifier: Classifier) -> None:
    sides = [choose("tome", "average", keep_rate=0.3), choose("atc", "average", keep_rate=0.3)]
    refused, reduced = compare(classifier, picture(BOOT), sides).sides
    assert isinstance(refused, Refused) and "at least 98 stay" in refused.reason
    assert isinstance(reduced, Reduced) and reduced.counts == [58, 17, 5]


@pytest.mark.parametrize(("method", "linkage", "rate"), [("evil", "average", 0.5), ("atc", "ward", 0.5)])
def test_names_that_do_not_exist_are_refused(method: str, linkage: str, rate: float) -> None:
    with pytest.raises(ValueError, match="is not known"):
        choose(method, linkage, keep_rate=rate)


@pytest.mark.parametrize("rate", ["0.5", True, [0.5]])
def test_what_is_no_number_is_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        choose("atc", "average", keep_rate=rate)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, float("nan")])
def test_a_keep_rate_that_is_none_is_refused(classifier: Classifier, rate: float) -> None:
    [side] = compare(classifier, picture(BOOT), [choose("atc", "average", keep_rate=rate)]).sides
    assert isinstance(side, Refused) and "keep_rate" in side.reason


def test_lines_of_python_do_the_same(classifier: Classifier) -> None:
    fronts = Fronts()
    front = fronts.named("agglo_fashion_vit-half")
    chosen = [choose("atc", "complete", keep_rate=0.35), choose("random", "", keep_rate=0.5)]
    chosen += [front.chosen(number) for number in range(len(front.points))]
    assert chosen[2].line == 'agglo.apply(model, tuned="agglo_fashion_vit-half")'
    inputs, _ = classifier.prepare(picture(BOOT))
    for each in chosen:
        side = one(compare(classifier, picture(BOOT), [each]))
        model = eval(side.line, {"agglo": agglo, "model": own_model()})
        with torch.inference_mode():
            shares = model(inputs).softmax(-1)[0].topk(5).values.tolist()
        assert [answer.share for answer in side.top] == pytest.approx(shares, rel=1e-4), side.line


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_the_tree_is_scipys_and_its_cut_is_the_first_stage(classifier: Classifier, linkage: str) -> None:
    found = compare(classifier, picture(BOOT), [choose("atc", linkage, keep_rate=0.4)])
    tree, stages = found.tree, one(found).stages
    assert tree is not None and tree.is_method and (tree.block, tree.groups) == (3, 78)
    keys = []
    atc = agglo.parse_method(f"atc:linkage={linkage}")
    looking = watched(atc, lambda reduce, view: keys.append(patch_features(view, "keys")) or reduce(view))
    model = agglo.apply(own_model(), looking, keep_rate=0.4)
    with torch.inference_mode():
        model(classifier.prepare(picture(BOOT))[0])
    expected = scipy_linkage(pdist(keys[0][0].double().numpy(), "cosine"), linkage)
    assert np.allclose(np.sort(tree.merges[:, 2].numpy()), expected[:, 2], atol=1e-5)
    cut = agglo.cut(tree.merges, tree.groups).numpy()
    same = stages[3].reshape(-1)
    assert len({*zip(cut.tolist(), same.tolist(), strict=True)}) == len({*cut.tolist()}) == len({*same.tolist()})


def test_the_tree_beside_another_method_says_so(classifier: Classifier) -> None:
    tree = compare(classifier, picture(BOOT), [choose("tome", "", keep_rate=0.5)]).tree
    assert tree is not None and not tree.is_method and tree.linkage == "average"
    both = [choose("tome", "", keep_rate=0.5), choose("atc", "single", keep_rate=0.5)]
    tree = compare(classifier, picture(BOOT), both).tree
    assert tree is not None and tree.is_method and tree.linkage == "single"


@pytest.mark.parametrize("size", [(1, 1), (3, 50), (640, 37), (28, 28)])
def test_pictures_of_any_size(classifier: Classifier, size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 60).convert("RGB")
    assert one(compare(classifier, image, [choose("atc", "average", keep_rate=0.5)])).counts == [98, 49, 24]


def test_a_threshold_leaves_an_easy_picture_fewer_tokens(classifier: Classifier) -> None:
    for distance in (0.05, 0.1, 0.2):
        found = threshold(classifier, [picture(EASY), picture(HARD)], distance, "average")
        easy, hard = (one(each) for each in found.pictures)
        assert easy.counts[-1] < hard.counts[-1]
        _, trace = by_the_library(classifier, picture(HARD), method="atc", threshold=distance)
        assert hard.counts == [len(np.unique(of[0])) for of in patch_labels(trace).values()]
        assert found.line == f'agglo.apply(model, "atc", threshold={distance}, linkage="average")'


def test_what_a_threshold_costs_is_counted_by_what_it_left(classifier: Classifier) -> None:
    found = one(threshold(classifier, [picture(EASY)], 0.1, "average").pictures[0])
    model = agglo.apply(own_model(), "atc", schedule=agglo.Counts(found.counts, blocks=[3, 6, 9]))
    told = agglo.reduction(model)
    assert told is not None and found.gflops == told.gflops_after


def test_a_threshold_of_nothing_keeps_what_is_not_the_same(classifier: Classifier) -> None:
    image = Image.effect_noise((28, 28), 90).convert("RGB")
    counts = one(threshold(classifier, [image], 0.0, "average").pictures[0]).counts
    assert counts[0] >= 190


def test_a_reduction_has_a_title(classifier: Classifier) -> None:
    assert Chosen("a", {"method": "atc", "keep_rate": 0.5}).line == 'agglo.apply(model, "atc", keep_rate=0.5)'
    assert choose("tome", "single", keep_rate=1.0).title == "tome"
