"""Recipes say what the paper says, and refuse what no run could have."""

from __future__ import annotations

import itertools
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import timm

import agglo
from agglo.lab.cli import main
from agglo.lab.options import help_texts
from agglo.lab.tasks.classification.data import dataset_names
from agglo.lab.tasks.classification.training.settings import RECIPES, TrainingSettings
from agglo.lab.training.reduction import BUDGETS

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


@pytest.mark.parametrize(("linkage", "keep_rate"), SELECTED)
@pytest.mark.parametrize("model", ["deit_tiny_patch16_224", "deit_base_patch16_224"])
def test_selected_on_imagenet(model: str, linkage: str, keep_rate: float) -> None:
    found = resolve("deit", model=model, method="atc", linkage=linkage, keep_rate=keep_rate)
    assert (found.warmup_epochs, found.backbone_lr_scale, found.frozen_epochs) == SELECTED[linkage, keep_rate]


def test_other_data_have_sets_of_their_own_except_two_cells() -> None:
    for dataset in ("nabirds", "coco", "nuswide"):
        for linkage, keep_rate in SELECTED:
            found, notes = RECIPES.load("deit").resolve(
                {"dataset": dataset, "method": "atc", "linkage": linkage, "keep_rate": keep_rate}
            )
            its_own = not (dataset == "nuswide" and keep_rate == 0.9 and linkage != "average")
            assert found.warmup_epochs == (5 if its_own else 20)
            assert any("not known" in note for note in notes)
            assert (found.mixup, found.cutmix) == ((0.8, 1.0) if dataset == "nabirds" else (0, 0))


IMAGENETS = "those that ATC was given most often are taken"
AT_THIS_RATE = "selected these for keep rates of 0.25, 0.5, 0.7 and 0.9 alone"
FULL_RATE = "the whole model learns at the full rate"


@pytest.mark.parametrize("dataset", dataset_names())
def test_notes_tell_where_the_rates_are_from_and_never_two_places(dataset: str) -> None:
    recipe = RECIPES.load("deit")
    for method, keep_rate in itertools.product((info.name for info in agglo.list_methods()), (0.5, 0.6)):
        found, notes = recipe.resolve({"dataset": dataset, "method": method, "keep_rate": keep_rate})
        told = {text for text in (IMAGENETS, AT_THIS_RATE, FULL_RATE) if any(text in note for note in notes)}
        if dataset in ("nabirds", "coco", "nuswide"):
            expected, rates = {FULL_RATE}, (1, 0)
        elif method == "atc":
            expected, rates = {AT_THIS_RATE} if keep_rate == 0.6 else set(), (0.01, 5)
        else:
            expected, rates = {IMAGENETS}, (0.01, 5)
        assert told == expected and (found.backbone_lr_scale, found.frozen_epochs) == rates, (method, keep_rate)


def test_atc_by_a_schedule_has_no_rates_of_the_papers() -> None:
    _, notes = RECIPES.load("deit").resolve({"method": "atc", "schedule": "constant:8"})
    assert any(AT_THIS_RATE in note for note in notes)


def test_data_sets_augment_as_the_study_did() -> None:
    birds, coco = resolve("deit", dataset="nabirds"), resolve("deit", dataset="coco")
    assert (birds.randaugment, birds.colour_jitter, birds.erasing) == (None, 0.3, 0.25)
    assert (coco.randaugment, coco.cutout, coco.flip, coco.erasing) == ("rand-m9-mstd0.5-inc1", True, 0, 0)
    assert resolve("deit", dataset="coco", erasing=0.1).erasing == 0.1


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


def test_mae_is_the_papers_on_imagenet_alone() -> None:
    for dataset in dataset_names():
        found, notes = RECIPES.load("mae").resolve({"dataset": dataset, "checkpoint": "mae.pth"})
        assert any("ImageNet alone" in note for note in notes) is (dataset != "imagenet")
        assert (found.mixup == 0) is (dataset in ("coco", "nuswide"))


@pytest.mark.parametrize("budget", [{"keep_rate": 0.5}, {"threshold": 0.1}, {"schedule": "linear:16"}])
def test_the_budget_of_a_recipe_gives_way(budget: dict[str, Any]) -> None:
    found, notes = RECIPES.load("mae").resolve({"checkpoint": "mae.pth", **budget})
    assert {name: getattr(found, name) for name in BUDGETS} == {**dict.fromkeys(BUDGETS), **budget}
    ((name, value),) = budget.items()
    given_way = f"the recipe's schedule gives way to {name}={value!r}"
    assert (given_way in notes) is (name != "schedule")


def test_dropped_patches_give_way_to_a_method() -> None:
    """The obvious first try: the recipe of the embedded model, with fewer tokens."""
    recipe = RECIPES.load("fashion_mnist")
    found, notes = recipe.resolve({"method": "atc", "keep_rate": 0.5})
    assert found.patch_drop_rates == [] and notes == ["the recipe's patch_drop_rates gives way to method='atc'"]
    assert recipe.resolve({"method": "none"})[0].patch_drop_rates == recipe.resolve({})[0].patch_drop_rates != []
    with pytest.raises(ValueError, match="patch_drop_rates"):
        recipe.resolve({"method": "atc", "keep_rate": 0.5, "patch_drop_rates": [0.5]})
    assert recipe.resolve({})[1] == []


@pytest.mark.parametrize("model", ["vit_large_patch16_224", "vit_small_patch16_224"])
def test_models_that_mae_has_no_settings_for(model: str) -> None:
    """Without the tag timm would normalise images in another way than MAE did."""
    for dense in ({}, {"method": "none"}):
        with pytest.raises(ValueError, match=f"model='{model}'.*vit_huge_patch14_224.mae"):
            RECIPES.load("mae").resolve({"checkpoint": "mae.pth", "model": model, **dense})
    assert timm.get_pretrained_cfg(model).mean != timm.get_pretrained_cfg("vit_large_patch16_224.mae").mean


def test_methods_that_are_named_exist_and_all_others_have_settings_too() -> None:
    known = {info.name for info in agglo.list_methods()}
    for name in RECIPES.names():
        for case in RECIPES.load(name).cases:
            for named in (case.when, case.unless):
                assert set(named.get("method", [])) <= known | {"none"}
    for method in known:
        assert resolve("deit", method=method, keep_rate=0.7).distill == method.startswith("dynamicvit")


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
        ({"epochs": True}, "epochs=True"),
        ({"pretrained": 1}, "pretrained=1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"drop_path": 1.5}, "drop_path=1.5"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"method": "atc"}, "method='atc' needs"),
        ({"keep_rate": 0.5}, "keep_rate=0.5 needs a method"),
        ({"method_options": {"k": 5}}, "method_options={'k': 5} needs a method"),
        ({"method": "actc", "keep_rate": 0.5}, "'actc'.*'atc'"),
        ({"method": "atc", "keep_rate": 50}, "keep_rate=50"),
        ({"method": "atc", "keep_rate": 0.5, "schedule": "linear:3"}, "keep_rate and schedule"),
        ({"method": "atc", "schedule": "constant"}, "constant:14"),
        ({"method": "tome", "linkage": "single", "keep_rate": 0.5}, "'tome'.*'linkage'"),
        ({"method": "atc", "linkage": "ward", "keep_rate": 0.5}, "linkage='ward'"),
        ({"warmup_epochs": 31}, "warmup_epochs=31"),
        ({"dataset": "imagnet"}, "dataset='imagnet'"),
        ({"pretrained": False}, "from_scratch"),
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
        ("setings = {}", "'setings' is unknown"),
        ("[settings]\nlrr = 1", "'lrr' is no setting; close to it: lr"),
        ("[[case]]\nwhen = { modle = 'x' }", "case 1: 'modle' is no setting"),
        ("[[case]]\nunless = { model = 3 }", "model=3 must be text"),
        ("[[case]]\nsets = { lr = 1.0 }", "case 1: 'sets' is unknown"),
        ("[[case]]\n[[case]]\nset = 3", "case 2: set=3 must be a table"),
        ("[[case]]\nnote = 3", "note=3 must be text"),
        ("[case]\nset = { lr = 1.0 }", r"case=.* must be an array of tables"),
        ("case = [3]", "case 1: 3 must be a table"),
        ("[[settings]]", r"settings=\[\{\}\] must be a table"),
    ],
)
def test_impossible_recipes(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RECIPES.parse(text, "own")


def test_a_case_holds_when_and_unless() -> None:
    text = """
    [settings]
    from_scratch = true
    [[case]]
    when = { dataset = ["coco", "nuswide"] }
    unless = { epochs = [3, 4], lr = 0.5 }
    set = { seed = 7 }
    """
    recipe = RECIPES.parse(text, "own")
    for choices, holds in (
        ({"dataset": "coco"}, True),
        ({"dataset": "nuswide", "epochs": 6, "lr": 0.1}, True),
        ({"dataset": "folder"}, False),
        ({"dataset": "coco", "epochs": 3, "warmup_epochs": 0}, False),
        ({"dataset": "coco", "epochs": 4, "lr": 0.5, "warmup_epochs": 0}, False),
        ({"dataset": "coco", "lr": 0.5}, False),
    ):
        assert recipe.resolve(choices)[0].seed == (7 if holds else 0), choices


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('about = "mine"\n[settings]\nfrom_scratch = true\nepochs = 7\n')
    assert resolve(str(tmp_path / "own.toml")).epochs == 7
    (tmp_path / "latin.toml").write_bytes("about = 'für mich'".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.toml' is not text in UTF-8"):
        RECIPES.load(str(tmp_path / "latin.toml"))
    with pytest.raises(ValueError, match=r"none.toml' is not a file"):
        RECIPES.load(str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match="recipe='diet'"):
        RECIPES.load("diet")


def test_what_is_shown_is_a_recipe_of_the_same_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "deit", "--show", "--method", "evit", "--keep-rate", "0.7", "--set", "lr=2e-3"]) == 0
    shown = capsys.readouterr().out
    assert "# warm-up, backbone rate and frozen epochs of this method are not known" in shown
    again = RECIPES.parse(f"[settings]\n{shown}", "shown").resolve({})[0]
    assert asdict(again) == asdict(resolve("deit", method="evit", keep_rate=0.7, lr=2e-3))


def test_explanations_are_found() -> None:
    meanings = help_texts(TrainingSettings)
    assert meanings["model"].startswith("of timm by its name, or of another library: hf:PATH")
    assert set(meanings) <= {item.name for item in fields(TrainingSettings)} and len(meanings) > 30


def test_command_line_is_told_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["finetune"], "deit, fashion_mnist, mae"),
        (["finetune", "deit"], "--data"),
        (["finetune", "deit", "--data", "."], "--output"),
        (["finetune", "deit", "--set", "lr"], "'lr'"),
        (["sweep", "deit", "--data", ".", "--output", "x", "--over", "lrs=1,2"], "'lrs'"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert main(["finetune", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["deit", "fashion_mnist", "mae"]
