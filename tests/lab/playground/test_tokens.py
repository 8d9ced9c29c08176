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
from agglo import tracing, tuned
from agglo.config import ReductionConfig
from agglo.drawing.groups import patch_labels
from agglo.embedded import classifier as embedded
from agglo.hosts.registry import applied_modules
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.options import EMBEDDED
from agglo.lab.playground import tokens
from agglo.lab.playground.images import EASY, HARD, chosen_image
from agglo.lab.playground.settings import choose
from agglo.lab.playground.tokens import Classified, Classifier, compare
from agglo.lab.tasks.classification.data import open_split
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.models.opening import build
from agglo.utils.timing import timed_pass

BOOT = chosen_image("example:boot")  # the first image of the test set


def own_model() -> Any:
    """Another copy, which the page does not know."""
    return build(EMBEDDED)


def one(classifier: Classifier, image: Image.Image, config: ReductionConfig) -> Classified:
    [side] = compare(classifier, image, [config]).sides
    assert side.refused is None
    return side


def test_the_model_sees_what_an_evaluation_shows_it(classifier: Classifier) -> None:
    transform = evaluation_transform(inputs_for(classifier.model, "fashion-mnist"))
    split = open_split("fashion-mnist", embedded.IMAGES, "val", transform=transform)
    assert torch.equal(classifier.prepare(BOOT)[0][0], torch.as_tensor(split[0][0]))
    # Nothing is cut off: what is drawn on the page is the image of the data set.
    images, _ = read_split(embedded.IMAGES, "val")
    found = compare(classifier, BOOT, [choose("atc", keep_rate=0.5)])
    assert np.array_equal(found.pixels, np.stack([images[0]] * 3, axis=-1))
    wide, _ = classifier.prepare(Image.effect_noise((640, 37), 60).convert("RGB"))
    assert wide.shape == (1, 1, 28, 28)


@pytest.mark.parametrize("method", ["atc", "tome", "evit", "random"])
def test_every_method_gives_what_the_library_gives(classifier: Classifier, method: str) -> None:
    config = choose(method, keep_rate=0.6)
    side = one(classifier, BOOT, config)
    model = agglo.apply(own_model(), config)
    with torch.inference_mode(), agglo.trace(model) as trace:
        best = model(classifier.prepare(BOOT)[0]).softmax(-1)[0].topk(5)
    labels = {block: of[0] for block, of in patch_labels(trace).items()}
    assert list(side.stages) == list(labels)
    assert all(np.array_equal(side.stages[block].reshape(-1), labels[block]) for block in labels)
    assert [classifier.classes[number] for number in best.indices] == [name for name, _ in side.top]  # type: ignore[index]
    assert [probability for _, probability in side.top] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_dense_answers_gflops_and_refusals(classifier: Classifier) -> None:
    found = compare(classifier, BOOT, [choose("tome", keep_rate=0.3), choose("atc", "single", keep_rate=0.25)])
    assert agglo.report(classifier.model) is None  # dense afterwards
    assert "98" in str(found.sides[0].refused)
    model = own_model()
    with torch.inference_mode():
        dense = model(classifier.prepare(BOOT)[0]).softmax(-1)[0].topk(5)
    applied = agglo.report(agglo.apply(model, "atc", keep_rate=0.25, linkage="single"))
    assert applied is not None
    assert [each.gflops for each in found.passes] == [applied.gflops_before, applied.gflops_after]
    assert found.tokens == 196 and found.passes[1].counts == [49, 12, 3]
    assert [probability for _, probability in found.dense.top] == pytest.approx(dense.values.tolist(), rel=1e-5)


def test_the_timed_pass_is_not_watched(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[bool] = []  # at every timed pass: whether a trace is open, or the method's decisions are noted

    def timing(model: Any, inputs: Any) -> Any:
        methods = [module.agglo_applied.method for module in applied_modules(model)]
        timed.append(tracing.any_open or any("reduce" in vars(method) for method in methods))
        return timed_pass(model, inputs)

    monkeypatch.setattr(tokens, "timed_pass", timing)
    side = one(classifier, BOOT, choose("atc", keep_rate=0.5))
    assert side.stages and timed == [False, False]


@pytest.mark.parametrize("wrong", [{"method": "evil"}, {"linkage": "ward"}, {"keep_rate": 2}], ids=str)
def test_values_that_do_not_exist_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        choose(**{"method": "atc", "linkage": "single", "keep_rate": 0.5, **wrong})


def test_lines_of_python_do_the_same(classifier: Classifier) -> None:
    configs = [choose("atc", "complete", keep_rate=0.35), choose("random", keep_rate=0.5)]
    inputs, _ = classifier.prepare(BOOT)
    for config in [*configs, tuned.config("agglo_fashion_vit-half")]:
        side = one(classifier, BOOT, config)
        model = eval(side.line, {"agglo": agglo, "model": own_model()})
        with torch.inference_mode():
            best = model(inputs).softmax(-1)[0].topk(5).values.tolist()
        assert [probability for _, probability in side.top] == pytest.approx(best, rel=1e-4), side.line


@pytest.mark.parametrize("linkage", ["average", "single"])
def test_the_tree_is_scipys_and_its_cut_is_the_first_stage(classifier: Classifier, linkage: str) -> None:
    found = compare(classifier, BOOT, [choose("atc", linkage, keep_rate=0.4)])
    tree = found.tree
    assert tree is not None and tree.is_method and (tree.block, tree.groups) == (3, 78)
    keys = []
    atc = agglo.methods.create("atc", linkage=linkage)
    reduce = atc.reduce
    atc.reduce = lambda view: keys.append(view.features("keys")) or reduce(view)
    model = agglo.apply(own_model(), atc, keep_rate=0.4)
    with torch.inference_mode():
        model(classifier.prepare(BOOT)[0])
    expected = scipy_linkage(pdist(keys[0][0].double().numpy(), "cosine"), linkage)
    assert np.allclose(np.sort(tree.merges[:, 2].numpy()), expected[:, 2], atol=1e-5)
    cut = agglo.clustering.cut(tree.merges, tree.groups).tolist()
    stage = found.passes[1].stages[3].reshape(-1).tolist()
    assert len({*zip(cut, stage, strict=True)}) == len({*cut}) == len({*stage})


def test_the_tree_is_of_the_side_that_is_atc(classifier: Classifier) -> None:
    tome = choose("tome", keep_rate=0.5)
    tree = compare(classifier, BOOT, [tome]).tree
    assert tree is not None and not tree.is_method and tree.linkage == "average"
    tree = compare(classifier, BOOT, [tome, choose("atc", "single", keep_rate=0.5)]).tree
    assert tree is not None and tree.is_method and tree.linkage == "single"


def test_a_threshold_leaves_an_easy_image_fewer_tokens_and_its_gflops_are_counted(classifier: Classifier) -> None:
    config = choose("atc", threshold=0.1)
    easy, hard = (one(classifier, chosen_image(name), config) for name in (EASY, HARD))
    assert easy.counts[-1] < hard.counts[-1]
    applied = agglo.report(agglo.apply(own_model(), "atc", schedule=agglo.Counts(easy.counts, blocks=[3, 6, 9])))
    assert applied is not None and easy.gflops == applied.gflops_after
