"""Figures of a model's groups say what the model says, and an animation is one tree cut ever lower."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from agglo.drawing.sheet import Row
from agglo.embedded.classifier import PHOTO
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.tasks.classification.evaluation import figures, grid
from agglo.lab.tasks.classification.evaluation.figures import animate, draw_configs
from agglo.methods import create
from agglo.models.opening import ModelSpec, build
from agglo.patch import apply
from tests.support.data import data_path

pytest.importorskip("timm")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[Row]]:
    """The rows of every sheet that was composed."""
    sheets: list[list[Row]] = []
    compose = figures.compose

    def noting(rows: list[Row]) -> Any:
        sheets.append(rows)
        return compose(rows)

    monkeypatch.setattr(figures, "compose", noting)
    return sheets


def test_answers_are_those_of_the_model_dense_and_reduced(drawn: list[list[Row]]) -> None:
    torch.manual_seed(0)
    model: Any = build(ModelSpec("test_vit", num_classes=4))
    torch.nn.init.normal_(model.head.weight)
    images = torch.rand(2, 3, 160, 160)
    configs = configs_of(["tome", "atc"], keep_rates=[0.5], linkages=["single", "average"])
    names, answers = ["one.jpg", "two.jpg"], {}
    with torch.no_grad():
        answers["input"] = [f"dense: {text}" for text in first_answers(model(images))]
        for config, name in configs.items():
            apply(model, config)
            count = 13 if name == "tome" else 12
            answers[name] = [f"{count} tokens: {text}" for text in first_answers(model(images))]
    draw_configs(model, images, images, configs, names=names, classes=list("abcd"))
    [rows] = drawn
    assert [row.name for row in rows] == names
    for index, row in enumerate(rows):
        assert {panel.title: panel.caption for panel in row.panels} == {n: texts[index] for n, texts in answers.items()}
    atc = {config: name for config, name in configs.items() if config.method == "atc"}
    average = {config: name for config, name in atc.items() if name == "atc average"}
    draw_configs(model, images, images, average, names=names, classes=list("abcd"))
    [first, _] = drawn[1]
    assert first.name == "one.jpg: atc average, keep 0.5"
    titles = ["input", "block 1: 50 tokens", "block 3: 25 tokens", "block 4: 12 tokens"]
    assert [panel.title for panel in first.panels] == titles
    assert first.panels[-1].caption == answers["atc average"][0].partition(": ")[2]
    assert [panel.caption for panel in first.panels[1:-1]] == ["", ""]

    draw_configs(model, images, images, atc, names=names, every_stage=True)
    assert [row.name for row in drawn[2]] == [f"{name}: {row}, keep 0.5" for name in names for row in atc.values()]
    assert all([panel.title for panel in row.panels] == titles for row in drawn[2])


def first_answers(logits: torch.Tensor) -> list[str]:
    odds = logits.double().exp() / logits.double().exp().sum(dim=1, keepdim=True)
    return [f"{'abcd'[int(row.argmax())]}, {100 * float(row.max()):.0f}%" for row in odds]


def test_an_animation_cuts_one_tree_ever_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = data_path("deit_tiny_patch16_224.safetensors")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(figures, "dissolve", lambda image, cuts, **rest: seen.update(rest, cuts=cuts))
    spec = ModelSpec("deit_tiny_patch16_224", weights)
    animate(spec, PHOTO, create("atc", linkage="complete"))
    counts = [len(np.unique(cut.labels)) for cut in seen["cuts"]]
    assert counts[-1] == figures.FEWEST and counts == sorted(set(counts), reverse=True)
    assert [cut.title for cut in seen["cuts"]] == [f"{count} tokens" for count in counts]
    for earlier, later in itertools.pairwise(cut.labels for cut in seen["cuts"]):
        pairs = {(int(a), int(b)) for a, b in zip(earlier.ravel(), later.ravel(), strict=True)}
        assert len(pairs) == len(np.unique(earlier))  # a group never splits
    model = build(spec)
    with torch.no_grad():
        dense = model(figures.prepared(model, [figures.open_image(PHOTO)])[0]).softmax(-1)
    assert seen["first"].caption == f"palace, {float(dense.max()):.0%}" and int(dense.argmax()) == 698


def test_visualize_and_evaluate_show_a_model_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = tmp_path / "val" / "a" / "photo.png"
    photo.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).resize((300, 200)).save(photo)
    checkpoint = tmp_path / "w.safetensors"
    save_file(build(ModelSpec("test_vit", options={"num_classes": 1})).state_dict(), checkpoint)
    spec = ModelSpec("test_vit", checkpoint)
    seen: list[Tensor] = []

    def noting(spec: ModelSpec, *rest: Any) -> Any:
        model = build(spec, *rest)
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        return model

    for module in (grid, figures):
        monkeypatch.setattr(module, "build", noting)
    configs = configs_of(["atc"], keep_rates=[0.5])
    grid.run(grid.EvaluationSettings(spec, tmp_path, configs, dense=False, workers=0))
    evaluated = len(seen)
    figures.visualize(spec, [photo], configs)
    assert len(seen) > evaluated > 0
    assert all(inputs.shape == (1, 3, 160, 160) and torch.equal(inputs, seen[0]) for inputs in seen)
