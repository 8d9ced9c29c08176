"""What a detector is trained with: decay by role, rates that drop, data held out, recipes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torchvision.transforms import v2

import agglo
from agglo.embedded import classifier
from agglo.lab.tasks.detection import vit_adapter
from agglo.lab.tasks.detection.data.transforms import MEAN, STD
from agglo.lab.tasks.detection.model.published import published_name
from agglo.lab.tasks.detection.model.vit import MINIATURE_SIDE, miniature_vit
from agglo.lab.tasks.detection.training.settings import RECIPES
from agglo.lab.tasks.detection.training.trainer import open_splits, parameter_groups, train_detector
from agglo.lab.training.settings import optimiser_and_schedule
from tests.support.detection import quick_detection, write_coco


def test_what_decays_is_what_decays_under_the_released_names() -> None:
    """The released rule: no decay for names that contain level_embed, pos_embed, norm or bias."""
    with torch.device("meta"):
        tiny = vit_adapter("tiny")
    decays = {
        name: group["weight_decay"] > 0
        for group in parameter_groups(tiny, weight_decay=0.05)
        for name in group["names"]
    }
    own = [name for name, _ in tiny.named_parameters()]
    assert sorted(decays) == sorted(own)
    for name in own:
        there = published_name(name)
        free = any(part in there for part in ("level_embed", "pos_embed", "norm", "bias"))
        assert decays[name] is not free, (name, there)
    # The two that surprise: scales of the prior's batch norms, and the injectors' gamma.
    assert decays["backbone.interactions.0.injector.gamma"] and decays["backbone.prior.stem.1.weight"]


def test_rates_warm_up_and_drop() -> None:
    settings = replace(quick_detection(), epochs=4, lr=1e-2, lr_batch=4, lr_drops=[2.0, 3.0], warmup_steps=5)
    optimiser, rates = optimiser_and_schedule(settings, [{"params": [nn.Parameter(torch.zeros(1))]}], 8, 10)
    seen = []
    for step in range(40):
        rates.step_update(step)
        seen.append(optimiser.param_groups[0]["lr"])
    # mmcv's: at step i of a warm-up of n, the rate times 1 - (1 - i / n) (1 - factor). Twice the batch, twice the rate.
    assert seen[:5] == pytest.approx([2e-2 * (1 - (1 - i / 5) * 0.999) for i in range(5)])
    assert seen[5:] == pytest.approx([2e-2] * 15 + [2e-3] * 10 + [2e-4] * 10)


def test_images_held_out_are_never_trained_on(tmp_path: Path) -> None:
    data = write_coco(tmp_path / "data", n_train=10)
    train, validation = open_splits(quick_detection(held_out=0.25), data)
    assert (len(train), len(validation)) == (8, 2) and not set(validation.image_ids) & set(train.image_ids)
    with pytest.raises(ValueError, match="held_out="):
        open_splits(quick_detection(held_out=0.05), data)


def test_the_miniatures_vit_sees_what_the_embedded_classifier_sees() -> None:
    small: Any = timm.create_model(classifier.NAME, pretrained=True).eval()
    large: Any = miniature_vit().eval()
    torch.manual_seed(0)
    grey = torch.randint(0, 256, (2, 1, 28, 28))
    enlarged = grey.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
    assert enlarged.shape[-1] == MINIATURE_SIDE
    mean, std = small.pretrained_cfg["mean"][0], small.pretrained_cfg["std"][0]
    with torch.inference_mode():
        expected = small.forward_features((grey / 255 - mean) / std)
        found = large.forward_features(v2.functional.normalize(enlarged.float(), MEAN, STD))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_recipes_say_what_the_study_says() -> None:
    assert RECIPES.names() == ["dense", "finetune", "miniature", "small_data"]
    weights = {"checkpoint": "deit.pth"}
    dense, notes = RECIPES.load("dense").resolve(weights)
    assert (dense.epochs, dense.lr_drops, dense.lr, dense.weight_decay) == (36, [27, 33], 1e-4, 0.05) and not notes
    assert (dense.warmup_steps, dense.warmup_factor, dense.loss_scale, dense.clip_grad) == (500, 0.001, 512, 0)
    for model, epochs, drop in (("tiny", 6, 4), ("small", 4, 3)):
        found, notes = RECIPES.load("finetune").resolve({**weights, "model": model, "method": "svit"})
        assert (found.epochs, found.lr_drops, found.lr, found.weight_decay) == (
            epochs,
            [drop],
            1e-5,
            1e-6,
        ) and not notes
    for recipe, start in (("finetune", weights), ("miniature", {})):
        for info in agglo.list_methods():
            found, _ = RECIPES.load(recipe).resolve({**start, "method": info.name, "keep_rate": 0.5})
            assert found.class_token is info.needs_class_attention, info.name


def test_settings_models_and_data_that_make_no_sense(tmp_path: Path) -> None:
    data = write_coco(tmp_path / "data")
    changes: Any
    for changes, message in (
        ({"from_scratch": False}, "no starting weights"),
        ({"checkpoint": "x.pth"}, "from_scratch=true"),
        ({"held_out": 1.0}, "held_out=1"),
        ({"image_size": 0}, "image_size=0"),
        ({"dataset": "coke"}, "dataset='coke'"),
        ({"dataset": "scenes", "held_out": 0.5}, "held_out=0.5"),
        ({"model": "tinny", "backbone_options": {}}, "model='tinny'"),
        ({"head_options": {"widht": 3}}, "widht"),
        ({"adapter_options": {"prior": 3}}, "prior"),
        ({"batch_size": 100}, "one step of 100"),
        ({"model": "tiny"}, "backbone_options"),
    ):
        with pytest.raises(ValueError, match=message):
            train_detector(quick_detection(**changes), data, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    path = data / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "annotations": []}))
    with pytest.raises(ValueError, match="no validation image has an object"):
        train_detector(quick_detection(), data, tmp_path / "run")
    content["categories"][0]["name"] = "green square"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="green square"):
        train_detector(quick_detection(), data, tmp_path / "run")
