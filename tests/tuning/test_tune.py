"""agglo.tune on real models: what it finds is what it says, on images the search did not see; and it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import agglo
from agglo.embedded import classifier
from agglo.experiments.fashion_mnist import read_split
from agglo.hosts.swap import UnsupportedModelError
from agglo.tuning import subject, submodule_output
from agglo.tuning.images import split
from agglo.tuning.points import Solver
from agglo.tuning.space import space_of
from agglo.tuning.subject import Arguments, Subject
from tests.support.detection import SMALL_MODEL
from tests.support.diffusion import dit
from tests.support.fashion import agglo_test_vit

timm = pytest.importorskip("timm")


@pytest.fixture(scope="module")
def real() -> tuple[nn.Module, Tensor, Tensor]:
    """The embedded classifier and some of its images, with their labels."""
    pixels, labels = read_split(classifier.IMAGES, "val")
    images = (torch.tensor(pixels[:40]).unsqueeze(1) / 255 - 0.2860) / 0.3530
    return timm.create_model(classifier.NAME, pretrained=True).eval(), images, torch.tensor(labels[:40]).long()


@pytest.fixture
def small() -> nn.Module:
    """4 blocks and 49 patches, random weights, and a head that does not start at zero."""
    torch.manual_seed(0)
    model: Any = agglo_test_vit().eval()
    nn.init.normal_(model.head.weight)
    return model  # type: ignore[no-any-return]


@pytest.fixture
def images() -> Tensor:
    return torch.rand(24, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time follows from tokens alone, in a way that the model of time cannot fit exactly."""

    def times(self: Subject, ways: Sequence[Arguments], repeats: int) -> list[list[float]]:
        costs = [self.cost(way) for way in ways]
        return [[0.1 + 0.85 * cost.gflops**1.2 + 0.02 * cost.pairs**0.5] * repeats for cost in costs]

    monkeypatch.setattr(Subject, "times", times)
    monkeypatch.setattr(Subject, "seconds_of_dense", lambda self: 0.01)


def test_what_is_found_is_what_is_told(
    real: tuple[nn.Module, Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_LEAST_SECONDS", 0.0)
    model, images, labels = real
    path = tmp_path / "tuned.json"
    how: dict[str, Any] = {"labels": labels, "batch_size": 8, "candidates": 3, "quiet": True}
    tuned = agglo.tune(model, images, gflops=0.5, path=path, **how)
    assert agglo.reduction(model) is None and not model.training

    # Recomputed from the arguments alone, on the images that were kept apart.
    unseen = split(images, labels, batch_size=8).confirmation
    inputs, classes = (torch.cat([getattr(batch, name) for batch in unseen]) for name in ("inputs", "labels"))
    with torch.inference_mode():
        dense = model(inputs)
        agglo.apply(model, **tuned)
        found = agglo.reduction(model)
        reduced = model(inputs)
        agglo.remove(model)
    expected = F.kl_div(reduced.log_softmax(1), dense.log_softmax(1), log_target=True, reduction="none").sum(1)
    assert tuned.quality.images == len(inputs) == 20
    assert tuned.quality.distance == pytest.approx(float(expected.mean()), rel=1e-3)
    assert tuned.quality.differing == int((dense.argmax(1) != reduced.argmax(1)).sum())
    right = [(logits.argmax(1) == classes).float().mean() for logits in (dense, reduced)]
    assert tuned.drop is not None and tuned.drop.points == pytest.approx(100 * float(right[0] - right[1]), abs=1e-3)
    assert found is not None and found.gflops_after is not None
    assert tuned.gflops == pytest.approx(found.gflops_after / found.gflops_before) and 0.4 < tuned.gflops <= 0.5

    content = json.loads(path.read_text())
    assert content["apply"] == dict(tuned) and content["apply"]["method"] == content["chosen"]["method"]
    assert [each["method"] for each in (content["chosen"], *content["beside"])] in (["atc", "tome"], ["tome", "atc"])
    alike = [point["search"]["total"] for point in tuned.front if 0.45 < point["gflops"] <= 0.5]
    assert len(alike) >= 2 and content["chosen"]["search"]["total"] == min(alike)
    assert {point["apply"]["method"] for point in tuned.points} == {"atc", "tome"}
    assert tuned.speedup > 0 and all(point["speed"]["low"] <= point["speed"]["high"] for point in tuned.front)

    report = tuned.report()
    for part in ("0.5 of the dense model's GFLOPs", "kept: ", "images the search did not see", "tome", "agglo.apply("):
        assert part in report
    tuned.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert agglo.Tuned.load(path) == tuned
    agglo.apply(model, tuned=path)
    assert agglo.reduction(model) == found
    agglo.remove(model)


@pytest.mark.usefixtures("_no_clock")
def test_a_search_that_was_stopped_goes_on_to_the_same_end(
    small: nn.Module, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(path: Path, **changes: Any) -> agglo.Tuned:
        how: dict[str, Any] = {"gflops": 0.6, "candidates": 4, "batch_size": 6, "quiet": True, **changes}
        return agglo.tune(small, images, path=path, **how)

    whole = tune(tmp_path / "whole.json")
    assert whole.quality.distance > 0
    replace, writes = os.replace, 0

    def interrupted(source: Any, target: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == 9:
            os.truncate(source, 100)
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "stopped.json")
    assert agglo.reduction(small) is None
    left = json.loads((tmp_path / "stopped.json").read_text())
    assert left["apply"] is None and 0 < len(left["steps"]) < len(whole.content["steps"])
    with pytest.raises(ValueError, match="is a search that was stopped: type the same command again"):
        agglo.apply(small, tuned=tmp_path / "stopped.json")
    evaluate, evaluations = Subject.quality, 0

    def counted(self: Subject, *arguments: Any) -> Any:
        nonlocal evaluations
        evaluations += 1
        return evaluate(self, *arguments)

    monkeypatch.setattr(Subject, "quality", counted)
    again = tune(tmp_path / "stopped.json")
    kinds = ("quality", "confirmation")
    assert again == whole and again.content["front"] == whole.content["front"]
    assert [step for step in again.content["steps"] if step["kind"] in kinds] == [
        step for step in whole.content["steps"] if step["kind"] in kinds
    ]
    done = sum(step["kind"] in kinds for step in left["steps"])
    assert evaluations == sum(step["kind"] in kinds for step in whole.content["steps"]) - done
    evaluations = 0
    assert tune(tmp_path / "stopped.json") == whole and evaluations == 0
    with pytest.raises(ValueError, match=r"holds another search .target: .*0.6.* there, .*0.5.* now"):
        tune(tmp_path / "stopped.json", gflops=0.5)


@pytest.mark.usefixtures("_no_clock")
def test_a_speed_is_met_and_hardly_passed(small: nn.Module, images: Tensor) -> None:
    tuned = agglo.tune(small, images, speedup=1.5, candidates=4, batch_size=6, quiet=True)
    assert 1.5 <= tuned.speedup < 1.65
    assert "kept: " in tuned.report() and tuned.content["latency"] is not None
    for each in tuned.content["beside"]:
        assert each["speed"]["median"] >= 1.5
    with pytest.raises(
        ValueError, match=r"no method can do it: 50 times as fast as dense; atc cannot do it .it costs 0"
    ):
        agglo.tune(small, images, speedup=50, candidates=2, batch_size=6, quiet=True)


@pytest.mark.usefixtures("_no_clock")
def test_without_labels_a_drop_is_of_decisions_and_told_so(small: nn.Module, images: Tensor) -> None:
    tuned = agglo.tune(small, images, max_drop=40.0, candidates=3, batch_size=6, quiet=True)
    assert tuned.speedup > 1 and tuned.drop is None and tuned.quality.disagreement is not None
    assert "decisions, of which accuracy can lose no more than that" in tuned.report()


def test_the_clock_is_of_turns_with_the_dense_model(small: nn.Module, images: Tensor) -> None:
    timed = Subject(small, split(images, batch_size=6), output=None, objective="auto", tower=None, n_tokens=None)
    assert (timed.objective, timed.decides, timed.tokens, timed.depth) == ("kl", True, 49, 4)
    ran: list[int | None] = []
    small.register_forward_pre_hook(lambda module, inputs: ran.append(_tokens_left(module)))
    timed._passes = 1
    found = timed.times([{"method": "atc", "schedule": "counts:10@0"}, {"method": "tome", "keep_rate": 0.9}], 2)
    assert ran == [*[None, 10, 35, None] * 2, None, 35, 10, None]
    assert len(found) == 2 and all(len(of_one) == 2 and min(of_one) > 0 for of_one in found)
    assert agglo.reduction(small) is None


def test_as_many_tokens_stay_as_the_level_allows(small: nn.Module, images: Tensor) -> None:
    timed = Subject(small, split(images, batch_size=6), output=None, objective="auto", tower=None, n_tokens=None)
    space = space_of("tome", depth=4, diffusion=False, tries=lambda arguments: None)
    solver = Solver(timed, {"tome": space}, by_time=False)
    points = []
    for candidate in (space.first(), *space.around(space.first())):
        with suppress(ValueError):  # some begin too late to save so much
            points.append(solver.solve(candidate, 0.7))
    assert len(points) >= 5
    for point in points:
        assert 0.66 < point.cost.gflops <= 0.7
        agglo.apply(small, **point.arguments)
        found = agglo.reduction(small)
        assert found is not None and found.counts == point.cost.counts
        agglo.remove(small)
    with pytest.raises(ValueError, match=r"it costs 0\.\d+ of the dense model at the least, and 0.01 was asked for"):
        solver.solve(space.first(), 0.01)


def _tokens_left(module: nn.Module) -> int | None:
    found = agglo.reduction(module)
    return None if found is None or found.counts is None else found.counts[-1]


def test_embeddings_are_compared_by_their_error(images: Tensor) -> None:
    torch.manual_seed(0)
    model = agglo_test_vit(num_classes=0).eval()
    tuned = agglo.tune(model, images, gflops=0.7, methods=["tome"], candidates=2, batch_size=6, quiet=True)
    assert tuned.content["settings"]["objective"] == "relative" and 0 < tuned.quality.distance < 2
    assert tuned.quality.differing is None and tuned["method"] == "tome"
    with pytest.raises(
        ValueError, match=r"max_drop=1.0 is about decisions, and outputs compared by 'relative' are none"
    ):
        agglo.tune(model, images, max_drop=1.0)


def test_a_function_of_the_users_says_what_is_compared_and_how(small: nn.Module, images: Tensor) -> None:
    def tokens(model: Any, batch: Tensor) -> Tensor:
        return model.forward_features(batch)

    def worst(dense: Any, reduced: Any) -> Tensor:
        return (dense - reduced).abs().flatten(1).amax(1)

    tuned = agglo.tune(
        small,
        images,
        gflops=0.7,
        output=tokens,
        objective=worst,
        methods=["tome"],
        candidates=2,
        batch_size=6,
        quiet=True,
    )
    assert tuned.content["settings"]["objective"] == "worst" and tuned.quality.distance > 0
    with pytest.raises(ValueError, match="output= does not run the transformer"):
        agglo.tune(small, images, gflops=0.7, output=lambda model, batch: model.patch_embed(batch), quiet=True)
    with pytest.raises(ValueError, match="the model answers with int, and which of it to compare is not clear"):
        agglo.tune(small, images, gflops=0.7, output=lambda model, batch: 7)


@pytest.mark.usefixtures("_no_clock")
def test_a_diffusion_model_is_tuned_by_the_noise_it_predicts() -> None:
    model, inputs = dit()
    batches = [{**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])} for _ in range(4)]
    tuned = agglo.tune(model, batches, gflops=0.6, candidates=2, quiet=True)
    assert tuned.content["settings"]["objective"] == "relative" and 0 < tuned["keep_rate"] < 1
    agglo.apply(model, **tuned)
    found = agglo.reduction(model)
    assert found is not None and found.gflops_after is not None
    assert found.gflops_after <= 0.6 * found.gflops_before
    assert tuned.gflops == pytest.approx(found.gflops_after / found.gflops_before)


@pytest.mark.usefixtures("_no_clock")
def test_a_detector_is_tuned_by_its_pyramid_on_images_of_several_sizes() -> None:
    from agglo.detection.specs import DetectorSpec

    torch.manual_seed(0)
    parts = ("backbone_options", "adapter_options", "head_options")
    spec = DetectorSpec(SMALL_MODEL["model"], 2, **{part: SMALL_MODEL[part] for part in parts}, image_size=64)
    model = spec.build().eval()
    pictures = [torch.rand(3, 48 + 16 * (number % 2), 64) for number in range(6)]
    tuned = agglo.tune(model, pictures, gflops=0.9, methods=["atc"], candidates=2, batch_size=1, quiet=True)
    assert tuned["schedule"].startswith("stages:") and tuned.content["settings"]["objective"] == "relative"
    seen = split(pictures, batch_size=1).confirmation[0].inputs
    with torch.inference_mode():
        before = submodule_output("neck")(model, seen)
        agglo.apply(model, **tuned)
        after = submodule_output("neck")(model, seen)
    assert len(before) == len(after) > 1 and not torch.equal(before[0], after[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "give one of speedup, max_drop and gflops, not none"),
        ({"speedup": 2, "gflops": 0.5}, "not speedup and gflops"),
        ({"speedup": 1.0}, "speedup=1.0 must lie above 1"),
        ({"max_drop": 0}, "max_drop=0 must lie above 0"),
        ({"gflops": 50}, "gflops=50 must lie between 0 and 1"),
        ({"gflops": True}, "gflops=True must lie"),
        ({"gflops": 0.5, "methods": ["nobody"]}, "method='nobody' is not known"),
        ({"gflops": 0.5, "methods": "atc"}, "methods='atc' must be a list of different names"),
        ({"gflops": 0.5, "methods": ["dynamicvit"]}, "method 'dynamicvit' learns"),
        ({"gflops": 0.5, "minutes": 0}, "minutes=0 must be a number above 0"),
        ({"gflops": 0.5, "candidates": 1}, "candidates=1 must be a whole number, at least 2"),
        ({"gflops": 0.5, "tower": nn.Identity()}, "tower=Identity is not a submodule"),
        ({"gflops": 0.5, "objective": "l2"}, "objective='l2' is not known"),
        ({"gflops": 0.5, "path": "/nowhere/tuned.json"}, "lies in no folder"),
    ],
)
def test_bad_input_is_told(small: nn.Module, images: Tensor, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agglo.tune(small, images, **how)
    assert agglo.reduction(small) is None


def test_models_that_cannot_be_tuned_are_told(small: nn.Module, images: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match=r"a torch.nn.Module is needed, got str"):
        agglo.tune("deit", images, gflops=0.5)  # type: ignore[arg-type]
    agglo.apply(small, keep_rate=0.5)
    with pytest.raises(ValueError, match=r"reduced already: call agglo.remove\(model\) first"):
        agglo.tune(small, images, gflops=0.5)
    assert agglo.reduction(small) is not None


def test_the_command_writes_result_picture_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agglo.cli import main

    output = tmp_path / "tuned.json"
    command = ["tune", classifier.NAME, "--pretrained", "--data", str(classifier.IMAGES), "--images", "16"]
    command += ["--method", "tome"]
    command += ["--gflops", "0.6", "--candidates", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu"]
    assert main([*command, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert output.with_suffix(".txt").read_text() == printed and "accuracy lost:" in printed
    assert output.with_suffix(".png").stat().st_size > 10_000
    tuned = agglo.Tuned.load(output)
    assert tuned.quality.images == 8 and tuned.content["model"]["name"] == classifier.NAME
    assert main([*command, "-o", str(tmp_path / "tuned.txt")]) == 2
    assert "must end in .json" in capsys.readouterr().err
    assert main([*command, "--seed", "1", "-o", str(output)]) == 2
    assert "holds another search" in capsys.readouterr().err
