"""What the page computes of an image is what the library gives, and the line of Python gives the same."""

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
from agglo.lab.playground import tokens
from agglo.lab.playground.fronts import Fronts
from agglo.lab.playground.images import EASY, HARD, chosen_image
from agglo.lab.playground.settings import Chosen, choose, methods
from agglo.lab.playground.tokens import EMBEDDED, Classifier, Passed, Refused, compare
from agglo.methods.helpers.features import patch_features
from agglo.methods.helpers.watching import watched
from agglo.models.opening import build
from agglo.utils.timing import timed_pass

BOOT = chosen_image("example:boot")


def own_model() -> Any:
    """Another copy, which the page does not know."""
    return build(EMBEDDED)


def one(classifier: Classifier, image: Image.Image, chosen: Chosen) -> Passed:
    [side] = compare(classifier, image, [chosen]).sides
    assert isinstance(side, Passed)
    return side


@pytest.mark.parametrize("method", methods())
def test_every_method_gives_what_the_library_gives(classifier: Classifier, method: str) -> None:
    chosen = choose(method, "average", keep_rate=0.6)
    side = one(classifier, BOOT, chosen)
    model = agglo.apply(own_model(), chosen.config)
    with torch.inference_mode(), agglo.trace(model) as trace:
        best = model(classifier.prepare(BOOT)[0]).softmax(-1)[0].topk(5)
    labels = {block: of[0] for block, of in patch_labels(trace).items()}
    assert list(side.stages) == list(labels)
    assert all(np.array_equal(side.stages[block].reshape(-1), labels[block]) for block in labels)
    assert [classifier.classes[number] for number in best.indices] == [answer.name for answer in side.top]  # type: ignore[index]
    assert [answer.probability for answer in side.top] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_dense_answers_and_gflops_are_the_librarys(classifier: Classifier) -> None:
    found = compare(classifier, BOOT, [choose("atc", "single", keep_rate=0.25), choose("tome", "", keep_rate=0.1)])
    assert agglo.report(classifier.model) is None  # dense afterwards
    model = own_model()
    with torch.inference_mode():
        dense = model(classifier.prepare(BOOT)[0]).softmax(-1)[0].topk(5)
    applied = agglo.report(agglo.apply(model, "atc", keep_rate=0.25, linkage="single"))
    assert applied is not None
    assert [one.gflops for one in found.passes] == [applied.gflops_before, applied.gflops_after]
    assert found.tokens == 196 and found.passes[1].counts == [49, 12, 3]
    assert [answer.probability for answer in found.dense.top] == pytest.approx(dense.values.tolist(), rel=1e-5)


@pytest.mark.parametrize("method", ["atc", "tome"])
def test_the_timed_pass_is_not_watched(classifier: Classifier, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[bool] = []  # at every timed pass: whether a trace is open
    noted: list[bool] = []  # at every decision that is noted: whether the pass is timed
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
    side = one(classifier, BOOT, choose(method, "average", keep_rate=0.5))
    assert side.stages and timed == [False, False] and noted == [False] * len(side.stages)


def test_what_a_method_cannot_do_is_said_and_the_other_side_stays(classifier: Classifier) -> None:
    sides = [choose("tome", "average", keep_rate=0.3), choose("atc", "average", keep_rate=0.3)]
    refused, reduced = compare(classifier, BOOT, sides).sides
    assert isinstance(refused, Refused) and "98" in refused.reason
    assert isinstance(reduced, Passed) and reduced.counts == [58, 17, 5]


@pytest.mark.parametrize(
    ("method", "linkage", "rate"),
    [("evil", "average", 0.5), ("atc", "ward", 0.5), *(("atc", "average", rate) for rate in ("0.5", True, 0.0, 1.5))],
)
def test_names_that_do_not_exist_and_what_is_no_number_are_refused(method: str, linkage: str, rate: Any) -> None:
    with pytest.raises(ValueError, match=r"evil|linkage|keep_rate"):
        choose(method, linkage, keep_rate=rate)


def test_lines_of_python_do_the_same(classifier: Classifier) -> None:
    front = Fronts().named("agglo_fashion_vit-half")
    chosen = [choose("atc", "complete", keep_rate=0.35), choose("random", "", keep_rate=0.5)]
    chosen += [front.chosen(number) for number in range(len(front.points))]
    assert chosen[2].line == 'agglo.apply(model, tuned="agglo_fashion_vit-half")'
    inputs, _ = classifier.prepare(BOOT)
    for each in chosen:
        side = one(classifier, BOOT, each)
        model = eval(side.line, {"agglo": agglo, "model": own_model()})
        with torch.inference_mode():
            best = model(inputs).softmax(-1)[0].topk(5).values.tolist()
        assert [answer.probability for answer in side.top] == pytest.approx(best, rel=1e-4), side.line


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_the_tree_is_scipys_and_its_cut_is_the_first_stage(classifier: Classifier, linkage: str) -> None:
    found = compare(classifier, BOOT, [choose("atc", linkage, keep_rate=0.4)])
    tree = found.tree
    assert tree is not None and tree.is_method and (tree.block, tree.groups) == (3, 78)
    keys = []
    atc = agglo.methods.parse_method(f"atc:linkage={linkage}")
    looking = watched(atc, lambda reduce, view: keys.append(patch_features(view, "keys")) or reduce(view))
    model = agglo.apply(own_model(), looking, keep_rate=0.4)
    with torch.inference_mode():
        model(classifier.prepare(BOOT)[0])
    expected = scipy_linkage(pdist(keys[0][0].double().numpy(), "cosine"), linkage)
    assert np.allclose(np.sort(tree.merges[:, 2].numpy()), expected[:, 2], atol=1e-5)
    cut = agglo.clustering.cut(tree.merges, tree.groups).tolist()
    stage = found.passes[1].stages[3].reshape(-1).tolist()
    assert len({*zip(cut, stage, strict=True)}) == len({*cut}) == len({*stage})


def test_the_tree_is_of_the_side_that_is_atc(classifier: Classifier) -> None:
    tome = choose("tome", "", keep_rate=0.5)
    tree = compare(classifier, BOOT, [tome]).tree
    assert tree is not None and not tree.is_method and tree.linkage == "average"
    tree = compare(classifier, BOOT, [tome, choose("atc", "single", keep_rate=0.5)]).tree
    assert tree is not None and tree.is_method and tree.linkage == "single"


@pytest.mark.parametrize("size", [(1, 1), (640, 37)])
def test_images_of_any_size(classifier: Classifier, size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 60).convert("RGB")
    assert one(classifier, image, choose("atc", "average", keep_rate=0.5)).counts == [98, 49, 24]


def test_a_threshold_leaves_an_easy_image_fewer_tokens_and_its_gflops_are_counted(classifier: Classifier) -> None:
    for distance in (0.05, 0.1, 0.2):
        chosen = choose("atc", "average", threshold=distance)
        easy, hard = (one(classifier, chosen_image(name), chosen) for name in (EASY, HARD))
        assert easy.counts[-1] < hard.counts[-1]
        model = agglo.apply(own_model(), "atc", schedule=agglo.Counts(easy.counts, blocks=[3, 6, 9]))
        applied = agglo.report(model)
        assert applied is not None and easy.gflops == applied.gflops_after
    image = Image.effect_noise((28, 28), 90).convert("RGB")
    assert one(classifier, image, choose("atc", "average", threshold=0.0)).counts[0] >= 190
