"""Which parameters learn how fast, and rates step by step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import timm
from torch import nn

import agglo
from agglo.lab.tasks.classification.training.trainer import freeze_backbone, parameter_groups
from agglo.lab.training.settings import optimiser_and_schedule
from agglo.models.opening import ModelSpec, build
from tests.support import tiny_models
from tests.support.fashion import plain


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group for group in groups for name in group["names"]}


def test_new_modules_at_the_full_rate_and_what_decays() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    groups = parameter_groups(model, weight_decay=0.05, backbone_lr_scale=0.01)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        group, new = by_name(groups)[name], name.split(".")[0] in ("head", "pos_embed", "patch_embed")
        assert group["lr_scale"] == (1 if new else 0.01) and group["backbone"] is not new, name
        undecayed = parameter.ndim <= 1 or name in ("pos_embed", "cls_token")
        assert group["weight_decay"] == (0 if undecayed else 0.05), name


def test_what_a_method_learns_is_new() -> None:
    model = agglo.apply(timm.create_model("test_vit"), "dynamicvit", keep_rate=0.5)
    groups = by_name(parameter_groups(model, weight_decay=0.05, layer_decay=0.5, backbone_lr_scale=0.01))
    learned = {name: group for name, group in groups.items() if "predictors" in name}
    assert learned and all(group["lr_scale"] == 1 and not group["backbone"] for group in learned.values())


@pytest.mark.parametrize(("pooling", "norm"), [("token", "norm"), ("avg", "fc_norm")])
def test_layers_decay_as_mae_has_it(pooling: str, norm: str) -> None:
    model = timm.create_model("test_vit", global_pool=pooling)  # 6 blocks
    groups = by_name(parameter_groups(model, weight_decay=0.05, layer_decay=0.5, backbone_lr_scale=0.1))
    expected = {f"blocks.{block}.norm2.bias": 0.1 * 0.5 ** (6 - block) for block in range(6)}
    expected |= {"cls_token": 0.1 / 128, "pos_embed": 1 / 128, "patch_embed.proj.weight": 1 / 128}
    expected |= {f"{norm}.weight": 0.1, f"{norm}.bias": 0.1, "head.weight": 1.0, "head.bias": 1.0}
    for name, factor in expected.items():
        assert math.isclose(groups[name]["lr_scale"], factor), name


def rates(steps: int, **changes: Any) -> list[tuple[float, float]]:
    """(backbone, new) rates of a run of 4 epochs of 5 steps."""
    model = timm.create_model("test_vit", num_classes=3)
    settings = plain(epochs=4, **changes)
    groups = parameter_groups(model, weight_decay=0.05, backbone_lr_scale=settings.backbone_lr_scale)
    optimiser, scheduler = optimiser_and_schedule(settings, groups, total_batch=32, steps_per_epoch=5)
    seen = []
    for step in range(steps):
        scheduler.step_update(step)
        if step // 5 < settings.frozen_epochs:
            freeze_backbone(optimiser.param_groups)
        found = {group["backbone"]: group["lr"] for group in optimiser.param_groups}
        seen.append((found[True], found[False]))
    return seen


def test_rates_are_a_cosine_whose_beginning_is_replaced_by_warmup() -> None:
    found = rates(20, lr=1e-3, lr_batch=16, min_lr=1e-5, warmup_lr=1e-6, warmup_epochs=1.0, backbone_lr_scale=0.01)
    peak = 2e-3  # twice the batch that lr is for
    for step, (backbone, new) in enumerate(found):
        cosine = 1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * step / 20)) / 2
        expected = 1e-6 + (peak - 1e-6) * step / 5 if step < 5 else cosine
        assert math.isclose(new, expected, rel_tol=1e-9)
        # The smallest rate is scaled too: a slow backbone does not speed up while everything else slows down.
        assert math.isclose(backbone, expected * 0.01, rel_tol=1e-9)


def test_rates_of_a_cosine_after_warmup() -> None:
    found = rates(20, lr=1e-3, lr_batch=32, min_lr=1e-6, warmup_lr=0.0, warmup_epochs=1.0, cosine_after_warmup=True)
    for step, (_, new) in enumerate(found):
        cosine = 1e-6 + (1e-3 - 1e-6) * (1 + math.cos(math.pi * (step - 5) / 15)) / 2
        assert math.isclose(new, 1e-3 * step / 5 if step < 5 else cosine, rel_tol=1e-9, abs_tol=1e-15)


def test_frozen_epochs_are_epochs() -> None:
    found = rates(20, frozen_epochs=2, warmup_epochs=0.0)
    assert all((backbone == 0) == (step < 10) and new > 0 for step, (backbone, new) in enumerate(found))


# Parts of names of the parameters that are new, and of those that do not decay although they are no vectors.
ELSEWHERE = {
    "transformers": (("position_embeddings", "patch_embeddings", "classifier"), ("cls_token", "position_embeddings")),
    "torchvision": (("pos_embedding", "conv_proj", "heads"), ("class_token", "pos_embedding")),
}


@pytest.mark.parametrize("library", ELSEWHERE)
def test_new_modules_and_decay_of_other_libraries(library: str, tmp_path: Path) -> None:
    if library == "torchvision":
        shape = {"image_size": 16, "patch_size": 8, "num_layers": 4, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
        model: Any = pytest.importorskip("torchvision").models.VisionTransformer(**shape)
    else:
        model = build(ModelSpec(f"hf:{tiny_models.vit_folder(tmp_path)}"))
    found = by_name(parameter_groups(model, weight_decay=0.05, backbone_lr_scale=0.1))
    new_parts, undecayed = ELSEWHERE[library]
    for part in (*new_parts, *undecayed):
        assert any(part in name for name in found), part
    for name, parameter in model.named_parameters():
        new = any(part in name for part in new_parts)
        assert found[name]["backbone"] is not new and found[name]["lr_scale"] == (1 if new else 0.1), name
        decays = parameter.ndim > 1 and not any(part in name for part in undecayed)
        assert found[name]["weight_decay"] == (0.05 if decays else 0), name


def test_layers_that_cannot_be_told_apart() -> None:
    with pytest.raises(ValueError, match="layer_decay="):
        parameter_groups(nn.Linear(2, 2), weight_decay=0.05, layer_decay=0.5)
