"""Results as HTML: images inside the text, text that cannot become markup; charts and trees show what was found."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.cluster.hierarchy import dendrogram as scipy_dendrogram
from scipy.cluster.hierarchy import linkage

from agglo import tuned
from agglo.lab.playground.html import Dendrogram, asset, data_url, render
from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.models import Models
from agglo.lab.playground.settings import choose
from agglo.lab.playground.tabs import answering
from agglo.lab.playground.tokens import Classifier, Tree, compare
from agglo.models.opening import ModelSpec

EVIL = "<img src=x onerror=alert(1)>"


def opened(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")


def test_small_images_are_exact_and_large_ones_small() -> None:
    draws = np.random.default_rng(0)
    small = draws.integers(0, 256, (28, 28, 3), dtype=np.uint8)
    assert np.array_equal(opened(data_url(small)), small)
    photo = Image.fromarray(small).resize((448, 448), Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(photo) + draws.normal(0, 12, (448, 448, 3)), 0, 255).astype(np.uint8)
    assert data_url(noisy).startswith("data:image/webp")
    assert np.abs(np.asarray(opened(data_url(noisy))).astype(float) - noisy).mean() < 10


def test_words_of_models_and_files_are_no_markup(classifier: Classifier) -> None:
    found = compare(classifier, chosen_image("example:boot"), [choose("atc", keep_rate=0.5)])
    dense = replace(found.dense, top=[(EVIL, 0.2) for _ in found.dense.top])
    for shown in (
        render("tokens", found=replace(found, dense=dense)),
        render("refused", sentence=EVIL),
    ):
        assert "<img src=x" not in shown and "&lt;img src=x" in shown
    for name in ("groups.js", "picker.js"):  # what is escaped in an attribute is not when a script reads it
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", asset(name))


def test_what_a_visitor_can_mend_is_said_and_other_errors_are_not() -> None:
    def failing(error: Exception) -> str:
        raise error

    assert "keep_rate" in answering(failing)(ValueError("keep_rate=2 is too much"))
    assert "diffusers" in answering(failing)(ModuleNotFoundError("no", name="diffusers"))
    with pytest.raises(RuntimeError):
        answering(failing)(RuntimeError("/secret/place broke"))


@pytest.mark.parametrize("n", [2, 50])
def test_the_dendrogram_is_scipys(n: int) -> None:
    merges = linkage(np.random.default_rng(0).normal(size=(n, 3)), "average")
    theirs = scipy_dendrogram(merges, no_plot=True)
    groups = (n + 1) // 2
    tree = drawn(merges, groups)
    paths = [
        [float(number) for number in re.findall(r"[\d.]+", path)] for path in (tree.below + tree.above).split("M")[1:]
    ]
    mine = [(path[0] / tree.step * 10, path[3] / tree.step * 10) for path in paths]  # SciPy's leaves are 10 wide
    assert np.allclose(sorted(mine), sorted((icoord[0], icoord[3]) for icoord in theirs["icoord"]), atol=0.1 * n)
    assert tree.below.count("M") == n - groups and [leaf for leaf, _ in tree.leaves] == theirs["leaves"]
    tops = [path[2] for path in paths]  # y grows downwards
    assert sum(top > tree.cut for top in tops) == n - groups


def test_tokens_that_are_all_the_same_have_a_tree() -> None:
    tree = drawn(linkage(np.zeros((6, 2)), "single"), 3)
    assert "nan" not in tree.below + tree.above


def drawn(merges: np.ndarray, groups: int) -> Dendrogram:
    tree = Tree(torch.from_numpy(merges), groups, 3, "average", is_method=True)
    return Dendrogram(tree, np.zeros((8, 8 * (len(merges) + 1), 3), np.uint8))


def test_results_of_tune_are_offered_where_their_model_runs(tmp_path: Path) -> None:
    typed = {"own": "hf:/home/anna/vit/", "other": "hf:/home/bert/vit", "sd": "/home/anna/sd/", "mine": "runs/mine"}
    files = [tmp_path / f"{title}.json" for title in typed]
    for path, name in zip(files, typed.values(), strict=True):
        content = tuned.read("agglo_fashion_vit-half")
        path.write_text(json.dumps({**content, "model": {**content["model"], "name": name}}), encoding="utf-8")

    def offered(models: Models) -> list[list[str]]:
        return [[title for title, _ in models.tuned_for(tab)] for tab in ("tokens", "synthesis", "detection")]

    own = Models(ModelSpec("hf:/home/anna/vit"), "/home/anna/sd", detector_name="runs/mine", tuned_files=files)
    assert offered(own) == [["tuned: own"], ["tuned: sd"], ["tuned: mine"]]
    embedded = Models(tuned_files=files)
    assert offered(embedded) == [["tuned: agglo_fashion_vit-half"], [], []]
    [(_, text)] = embedded.tuned_for("tokens")
    assert choose(text) == tuned.config("agglo_fashion_vit-half")
