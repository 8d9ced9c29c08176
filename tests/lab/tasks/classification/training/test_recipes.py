"""Recipes say what the paper says, and refuse what no run could have."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agglo.config import BUDGETS
from agglo.lab.cli import main
from agglo.lab.tasks.classification.data import dataset_names
from agglo.lab.tasks.classification.training.settings import RECIPES, TrainingSettings

# Warm-up epochs, backbone rate, frozen epochs, as the paper's table has them.
SELECTED = {
    ("single", 0.25): (5, 0.01, 5),
    ("single", 0.5): (5, 0.01, 5),
    ("single", 0.7): (5, 0.01, 5),
    ("single", 0.9): (20, 1, 0),
    ("average", 0.25): (5, 0.01, 5),
    ("average", 0.5): (20, 0.01, 5),
    ("average", 0.7): (5, 0.01, 5),
    ("average", 0.9): (5, 0.01, 5),
    ("complete", 0.25): (5, 0.01, 5),
    ("complete", 0.5): (20, 0.01, 5),
    ("complete", 0.7): (5, 0.01, 5),
    ("complete", 0.9): (20, 1, 0),
}


def resolve(name: str, **choices: Any) -> TrainingSettings:
    return RECIPES.load(name).resolve(choices)[0]


def test_selected_on_imagenet() -> None:
    for (linkage, keep_rate), expected in SELECTED.items():
        found = resolve("deit", model="deit_base_patch16_224", method="atc", linkage=linkage, keep_rate=keep_rate)
        assert (found.warmup_epochs, found.backbone_lr_scale, found.frozen_epochs) == expected


def test_other_data_have_rates_of_their_own_except_two_cells() -> None:
    recipe = RECIPES.load("deit")
    for dataset in ("nabirds", "coco", "nuswide"):
        for linkage, keep_rate in (("single", 0.5), ("single", 0.9), ("average", 0.9)):
            found, notes = recipe.resolve(
                {"dataset": dataset, "method": "atc", "linkage": linkage, "keep_rate": keep_rate}
            )
            of_imagenet = dataset == "nuswide" and (linkage, keep_rate) == ("single", 0.9)
            assert found.warmup_epochs == (20 if of_imagenet else 5)
            assert (found.backbone_lr_scale, found.frozen_epochs) == (1, 0)
            assert any("not known" in note for note in notes)
            assert (found.mixup, found.cutmix) == ((0.8, 1.0) if dataset == "nabirds" else (0, 0))


def test_notes_say_where_the_rates_are_from() -> None:
    for choices, expected in (
        ({"method": "atc", "keep_rate": 0.5}, 0),
        ({"method": "atc", "keep_rate": 0.6}, 1),
        ({"method": "atc", "schedule": "constant:8"}, 1),
        ({"method": "evit", "keep_rate": 0.5}, 1),
        ({"method": "dynamicvit", "keep_rate": 0.5}, 2),
        ({"method": "none"}, 1),
    ):
        found, notes = RECIPES.load("deit").resolve(choices)
        assert len(notes) == expected, choices
        dense = choices["method"] == "none"
        assert (found.backbone_lr_scale, found.frozen_epochs) == ((1, 0) if dense else (0.01, 5))
        assert found.distill == (choices["method"] == "dynamicvit")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("vit_base_patch16_224.mae", (100, 5e-4, 0.65, 0.1, "constant:16")),
        ("vit_large_patch16_224.mae", (50, 1e-3, 0.75, 0.2, "constant:8")),
        ("vit_huge_patch14_224.mae", (50, 1e-3, 0.75, 0.3, "constant:7")),
    ],
)
def test_mae(model: str, expected: tuple[float | str, ...]) -> None:
    found = resolve("mae", model=model, checkpoint="mae.pth")
    assert (found.epochs, found.lr, found.layer_decay, found.drop_path, found.schedule) == expected
    assert (found.lr_batch, found.linkage, found.proportional) == (256, "average", False)
    dense = resolve("mae", model=model, checkpoint="mae.pth", method="none")
    assert (dense.schedule, dense.proportional, dense.linkage) == (None, None, None)


def test_mae_is_the_papers_on_imagenet_alone_and_for_its_own_models() -> None:
    for dataset in dataset_names():
        found, notes = RECIPES.load("mae").resolve({"dataset": dataset, "checkpoint": "mae.pth"})
        assert any("ImageNet alone" in note for note in notes) is (dataset != "imagenet")
        assert (found.mixup == 0) is (dataset in ("coco", "nuswide"))
    # Without the tag timm would normalise images in another way than MAE did.
    with pytest.raises(ValueError, match="model='vit_large_patch16_224'"):
        resolve("mae", checkpoint="mae.pth", model="vit_large_patch16_224")


@pytest.mark.parametrize("budget", [{"keep_rate": 0.5}, {"threshold": 0.1}, {"schedule": "linear:16"}])
def test_a_chosen_budget_replaces_that_of_a_recipe(budget: dict[str, Any]) -> None:
    found = resolve("mae", checkpoint="mae.pth", **budget)
    assert {name: getattr(found, name) for name in BUDGETS} == {**dict.fromkeys(BUDGETS), **budget}


def test_a_chosen_method_replaces_dropped_patches() -> None:
    """The obvious first try: the recipe of the embedded model, with fewer tokens."""
    recipe = RECIPES.load("fashion_mnist")
    assert recipe.resolve({"method": "atc", "keep_rate": 0.5})[0].patch_drop_rates == []
    assert recipe.resolve({"method": "none"})[0].patch_drop_rates == recipe.resolve({})[0].patch_drop_rates != []
    with pytest.raises(ValueError, match="patch_drop_rates"):
        recipe.resolve({"method": "atc", "keep_rate": 0.5, "patch_drop_rates": [0.5]})


def test_what_a_person_chooses_goes_before_cases() -> None:
    found = resolve("deit", method="atc", linkage="single", keep_rate=0.9, warmup_epochs=3)
    assert (found.warmup_epochs, found.backbone_lr_scale) == (3, 1)
    assert resolve("deit", checkpoint="own.pth").pretrained is False
    assert resolve("fashion_mnist", checkpoint="own.pth").from_scratch is False


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"warm_up_epochs": 5}, "'warm_up_epochs'.*warmup_epochs"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"drop_path": 1.5}, "drop_path=1.5"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"method": "atc"}, "method='atc'"),
        ({"keep_rate": 0.5}, "keep_rate=0.5"),
        ({"method_options": {"k": 5}}, "method_options="),
        ({"method": "actc", "keep_rate": 0.5}, "'actc'.*'atc'"),
        ({"method": "atc", "keep_rate": 0.5, "schedule": "linear:3"}, "keep_rate and schedule"),
        ({"method": "tome", "linkage": "single", "keep_rate": 0.5}, "'linkage'"),
        ({"warmup_epochs": 31}, "warmup_epochs=31"),
        ({"dataset": "imagnet"}, "dataset='imagnet'"),
        ({"from_scratch": True}, "from_scratch"),
        ({"checkpoint": "f", "pretrained": True}, "checkpoint='f'"),
        ({"in_memory": True}, "in_memory"),
    ],
)
def test_impossible_choices(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RECIPES.load("deit").resolve(choices)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("settings = ", "own is not TOML"),
        ("setings = {}", "'setings'.*settings"),
        ("[settings]\nlrr = 1", "'lrr'.*lr"),
        ("[[case]]\nwhen = { modle = 'x' }", "case 1: 'modle'"),
        ("[[case]]\n[[case]]\nset = 3", "case 2: set=3"),
    ],
)
def test_impossible_recipes(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RECIPES.parse(text, "own")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('about = "mine"\n[settings]\nfrom_scratch = true\nepochs = 7\n')
    assert resolve(str(tmp_path / "own.toml")).epochs == 7
    with pytest.raises(ValueError, match="recipe="):
        RECIPES.load("diet")


def test_what_is_shown_is_a_recipe_of_the_same_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "deit", "--show", "--method", "evit", "--keep-rate", "0.7", "--set", "lr=2e-3"]) == 0
    again = RECIPES.parse(f"[settings]\n{capsys.readouterr().out}", "shown").resolve({})[0]
    assert asdict(again) == asdict(resolve("deit", method="evit", keep_rate=0.7, lr=2e-3))


def test_the_command_line_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["finetune"], "deit, fashion_mnist, mae"),
        (["finetune", "deit"], "--data"),
        (["finetune", "deit", "--set", "lr"], "'lr'"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert main(["finetune", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["deit", "fashion_mnist", "mae"]
