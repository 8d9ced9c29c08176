"""What training does, against short loops written out here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import agglo
from agglo.lab.tasks.classification.data import open_split
from agglo.lab.tasks.classification.data.transforms import Inputs
from agglo.lab.tasks.classification.evaluation.grid import evaluate
from agglo.lab.tasks.classification.training.settings import RECIPES, TrainingSettings
from agglo.lab.tasks.classification.training.trainer import (
    Classification,
    Objective,
    build_models,
    finetune,
    in_memory,
    open_splits,
    validation_loader,
)
from agglo.lab.training.batches import epoch_order
from agglo.models.checkpoints import Checkpoint
from agglo.models.opening import ModelSpec, build
from tests.support.fashion import last, log, plain, quick, write_fashion


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(settings: TrainingSettings, data: Path, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What an epoch sees where nothing is augmented."""
    images, targets = in_memory(open_split("fashion-mnist", data, "train"), Inputs((28, 28), (0.5,), (0.5,)))
    order = torch.tensor(epoch_order(len(images), settings.seed, epoch))
    for step in range(len(images) // settings.batch_size):
        chosen = order[step * settings.batch_size :][: settings.batch_size]
        yield (images[chosen].float() / 255 - 0.2860) / 0.3530, targets[chosen]


def test_the_loop_is_adamw_with_a_cosine_and_an_average(data: Path, tmp_path: Path) -> None:
    settings = plain(lr=1e-3, warmup_epochs=1.0, warmup_lr=1e-6, min_lr=1e-5, ema_decay=0.9, label_smoothing=0.1)
    finetune(settings, data, tmp_path / "run")
    model, _ = build_models(settings, 10)
    model.train()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and name not in ("pos_embed", "cls_token")]
    others = [p for name, p in model.named_parameters() if p.ndim <= 1 or name in ("pos_embed", "cls_token")]
    optimiser = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}])
    step = 0
    for epoch in range(2):
        for inputs, targets in batches(settings, data, epoch):
            cosine = 1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / 6)) / 2
            for group in optimiser.param_groups:
                group["lr"] = 1e-6 + (1e-3 - 1e-6) * step / 3 if step < 3 else cosine
            optimiser.zero_grad()
            F.cross_entropy(model(inputs), targets, label_smoothing=0.1).backward()
            optimiser.step()
            step += 1
            for name, value in model.state_dict().items():
                average[name] = 0.9 * average[name] + 0.1 * value
    found = last(tmp_path / "run")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["average"][name], average[name], rtol=1e-5, atol=1e-6)


def test_accumulated_batches_are_one_large_batch(data: Path, tmp_path: Path) -> None:
    for name, changes in (("large", {"batch_size": 16}), ("small", {"batch_size": 4, "accumulation": 4})):
        finetune(plain(epochs=1, shift=2, flip=0.5, **changes), data, tmp_path / name)
    large, small = last(tmp_path / "large"), last(tmp_path / "small")
    assert large["position"]["step"] == small["position"]["step"] == 3
    assert large["position"]["rows"][0]["train_loss"] == pytest.approx(small["position"]["rows"][0]["train_loss"], 1e-4)
    first = large["optimiser"]["state"][0]["exp_avg"]
    torch.testing.assert_close(
        first, small["optimiser"]["state"][0]["exp_avg"], rtol=0.05, atol=float(first.abs().max()) / 50
    )


def test_backbone_is_frozen_for_so_many_epochs(data: Path, tmp_path: Path) -> None:
    start = build_models(plain(), 10)[0].state_dict()
    finetune(plain(frozen_epochs=2, warmup_epochs=0.0), data, tmp_path / "run")
    found = last(tmp_path / "run")["model"]
    assert torch.equal(found["blocks.3.mlp.fc1.weight"], start["blocks.3.mlp.fc1.weight"])
    assert not torch.equal(found["head.weight"], start["head.weight"])


def test_patches_are_dropped_but_in_the_last_epochs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from timm.layers import PatchDropout

    seen = []
    forward = PatchDropout.forward

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        left: torch.Tensor = forward(self, x)
        if self.training:
            seen.append(left.shape[1] - 1)
        return left

    monkeypatch.setattr(PatchDropout, "forward", watched)
    finetune(quick(patch_drop_rates=[0.75]), data, tmp_path / "run")
    assert seen == [12] * 3 + [49] * 3


def test_best_weights_are_those_of_the_best_row(data: Path, tmp_path: Path) -> None:
    settings = plain(method="atc", keep_rate=0.5, linkage="complete", epochs=3, ema_decay=0.5, warmup_epochs=0.0)
    best = finetune(settings, data, tmp_path / "run")
    rows = log(tmp_path / "run")
    assert len(rows) == 3
    top = max(max(float(row["top1"]), float(row["ema_top1"])) for row in rows)
    assert best["best_metric"] == top
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == best
    model = build(ModelSpec(settings.model, tmp_path / "run" / "best" / "model.safetensors"))
    agglo.apply(model, settings.config)
    _, validation = open_splits(settings, data)
    found = evaluate(model, validation_loader(settings, validation, model))
    assert found["top1"] == top
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])


def test_dynamic_vit_adds_its_losses(data: Path) -> None:
    settings = plain(method="dynamicvit", keep_rate=0.5)
    model, _ = build_models(settings, 10)
    teacher, _ = build_models(plain(seed=1), 10)
    inputs, targets = next(batches(settings, data, 0))
    torch.manual_seed(0)
    loss = Objective(settings, model.train(), 10, False, teacher.eval())(model, inputs, targets)
    torch.manual_seed(0)
    tokens: Any
    with agglo.trace(model) as trace:
        tokens = model.forward_features(inputs)  # type: ignore[operator]
    logits = model.forward_head(tokens)  # type: ignore[operator]
    with torch.no_grad():
        taught = teacher.forward_features(inputs)  # type: ignore[operator]
        answers = teacher.forward_head(taught)  # type: ignore[operator]
    steps = [step.outcome.policy[:, 1:] for step in trace.steps if step.outcome.policy is not None]
    shares = (24 / 49, 12 / 49, 6 / 49)
    ratio = sum((mask.mean(1) - share).pow(2).mean() for mask, share in zip(steps, shares, strict=True)) / 3
    kept = steps[-1].detach() > 0.5
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1) + 2 * ratio
    expected = expected + 0.5 * F.kl_div(logits.log_softmax(-1), answers.softmax(-1), reduction="batchmean")
    expected = expected + 0.5 * (tokens[:, 1:] - taught[:, 1:])[kept].pow(2).mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    learned = [p for name, p in model.named_parameters() if "predictors" in name]
    assert learned and all(p.grad is not None and p.grad.abs().sum() > 0 for p in learned)


def test_dynamic_vit_trains_with_its_starting_weights_as_teacher(data: Path, tmp_path: Path) -> None:
    finetune(plain(epochs=1), data, tmp_path / "dense")
    weights = str(tmp_path / "dense" / "last" / "model.safetensors")
    settings = plain(epochs=1, method="dynamicvit", keep_rate=0.7, distill=True, checkpoint=weights, from_scratch=False)
    finetune(settings, data, tmp_path / "run")
    weights = str(tmp_path / "run" / "last" / "model.safetensors")
    again, _ = build_models(plain(method="dynamicvit", keep_rate=0.7, checkpoint=weights, from_scratch=False), 10)
    learned = {name: value for name, value in load_file(weights).items() if "agglo_method.predictors" in name}
    assert learned and all(torch.equal(again.state_dict()[name], value) for name, value in learned.items())
    with pytest.raises(ValueError, match="teacher"):
        build_models(settings, 7)
    with pytest.raises(ValueError, match="teacher"):
        build_models(plain(method="dynamicvit", keep_rate=0.7, distill=True), 10)


def test_several_labels_take_the_asymmetric_loss() -> None:
    model = timm.create_model("test_vit", num_classes=4)
    logits, targets = torch.randn(3, 4), torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).float()
    found = Objective(plain(), model, 4, True)(lambda _: logits, torch.empty(0), targets)  # type: ignore[arg-type]
    total = 0.0
    for z, y in zip(logits.flatten().tolist(), targets.flatten().tolist(), strict=True):
        p = 1 / (1 + math.exp(-z))
        q = min(1 - p + 0.05, 1)
        total -= math.log(p) if y else math.log(q) * (1 - q) ** 4
    assert float(found) == pytest.approx(total / 3, rel=1e-5)
    with pytest.raises(ValueError, match="mixup="):
        Objective(quick(), model, 4, True)


def test_several_labels_an_image_train_by_the_recipe(tmp_path: Path) -> None:
    """Images show a bright or a dark square, or both, or none."""
    random, lines = np.random.default_rng(0), ["file path,label,split name"]
    for index in range(12):
        names = [["dark"], ["bright"], ["dark", "bright"], []][index % 4]
        pixels = random.integers(100, 156, (60, 80, 3), dtype=np.uint8)
        for name in names:
            pixels[:30, 40 * (name == "bright") :][:, :40] = 255 * (name == "bright")
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        lines.append(f'{index}.png,"{names}",{("train", "val")[index // 6]}')
    (tmp_path / "nus_wid_data.csv").write_text("\n".join(lines))
    few = {"epochs": 1, "warmup_epochs": 0.0, "batch_size": 2, "accumulation": 1, "workers": 0, "precision": "no"}
    settings, _ = RECIPES.load("deit").resolve(
        {"model": "test_vit", "dataset": "nuswide", "pretrained": False, "from_scratch": True, "method": "evit"}
        | {"keep_rate": 0.7, **few}
    )
    best = finetune(settings, tmp_path, tmp_path / "run")
    rows = log(tmp_path / "run")
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert best["best_metric"] == max(float(row[name]) for row in rows for name in ("mAP", "ema_mAP"))


def test_a_head_of_other_classes_starts_afresh(data: Path, tmp_path: Path) -> None:
    finetune(plain(epochs=1), data, tmp_path / "dense")
    weights = str(tmp_path / "dense" / "last" / "model.safetensors")
    settings = plain(checkpoint=weights, from_scratch=False, head_std=2e-5)
    model, _ = build_models(settings, 7)
    checkpoint = Checkpoint.read(Path(weights))
    assert checkpoint.head_classes == 10
    assert checkpoint.fresh_names(model) == ["head.weight", "head.bias"]
    known, _ = build_models(settings, 10, checkpoint)
    before = last(tmp_path / "dense")["model"]
    assert checkpoint.fresh_names(known) == [] and torch.equal(known.state_dict()["head.weight"], before["head.weight"])
    assert model.head.weight.shape == (7, 64) and model.head.weight.abs().max() < 1e-3  # type: ignore[union-attr, operator]
    assert torch.equal(model.state_dict()["blocks.3.mlp.fc2.weight"], before["blocks.3.mlp.fc2.weight"])
    pooled, _ = build_models(plain(checkpoint=weights, from_scratch=False, global_pool="avg"), 10)
    assert torch.equal(pooled.state_dict()["head.weight"], before["head.weight"])
    assert isinstance(pooled.norm, nn.Identity) and torch.equal(pooled.fc_norm.weight, torch.ones(64))  # type: ignore[union-attr, arg-type]


def test_images_one_by_one_and_a_tracker(data: Path, tmp_path: Path) -> None:
    how = {"epochs": 3, "tracker": "tensorboard", "evaluate_first": True, "evaluate_every": 2}
    finetune(plain(in_memory=False, shift=2, flip=0.5, **how), data, tmp_path / "run")
    assert [row["epoch"] for row in log(tmp_path / "run")] == ["0", "2", "3"]
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_the_untrained_model_is_never_the_best(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([90.0, 10.0])
    monkeypatch.setattr(Classification, "evaluate", lambda self, model: {"top1": next(found)})
    best = finetune(plain(epochs=1, warmup_epochs=0.0, evaluate_first=True), data, tmp_path)
    assert best["epoch"] == 1 and best["top1"] == 10
    assert json.loads((tmp_path / "best" / "result.json").read_text())["epoch"] == 1


def test_runs_that_cannot_be_are_refused_and_leave_nothing(data: Path, tmp_path: Path) -> None:
    settings, run = plain(epochs=1, warmup_epochs=0.0), tmp_path / "run"
    for changes, message in (
        ({"batch_size": 64}, "batch_size"),
        ({"batch_size": 15, "mixup": 0.8}, "batch_size=15"),
        ({"model": "vit_nowhere"}, "vit_nowhere"),
        ({"model": "test_vit"}, "in_memory"),
        ({"precision": "fp16"}, "precision='fp16'"),
    ):
        if changes != {"precision": "fp16"} or not torch.accelerator.is_available():
            with pytest.raises(ValueError, match=message):
                finetune(replace(settings, **changes), data, run)  # type: ignore[arg-type]
    assert not run.exists()
    run.mkdir()
    (run / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match=r"settings\.json"):
        finetune(settings, data, run)
    for place in ("train/ant", "train/bee", "val/ant"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / place / "0.png")
    with pytest.raises(ValueError, match="bee"):
        open_splits(plain(dataset="folder", in_memory=False, shift=None), tmp_path)


def test_a_run_does_not_go_on_from_other_weights_or_images_of_the_same_name(tmp_path: Path) -> None:
    weights, data = tmp_path / "weights.pt", write_fashion(tmp_path / "data")
    settings = plain(checkpoint=str(weights), from_scratch=False, epochs=1, warmup_epochs=0.0)
    torch.save(build(ModelSpec("agglo_test_vit")).state_dict(), weights)
    finetune(settings, data, tmp_path / "run")
    torch.save(build(ModelSpec("agglo_test_vit")).state_dict(), weights)
    with pytest.raises(ValueError, match=r"weights: "):
        finetune(settings, data, tmp_path / "run")
    finetune(plain(epochs=1, warmup_epochs=0.0), data, tmp_path / "other")
    with pytest.raises(ValueError, match="training images: "):
        finetune(plain(epochs=1, warmup_epochs=0.0), write_fashion(data, n_train=47), tmp_path / "other")
