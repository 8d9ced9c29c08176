"""`agglo.tune` on real models: results hold on images the search did not see, and a stopped search continues."""

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
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.data.fashion_mnist import read_split
from agglo.tuning import TuneSettings, subject, submodule_output
from agglo.tuning.images import split
from agglo.tuning.search import solve
from agglo.tuning.space import space_of
from agglo.tuning.subject import Subject
from tests.support.detection import SMALL_MODEL
from tests.support.diffusion import dit
from tests.support.fashion import agglo_test_vit

timm = pytest.importorskip("timm")


def few(candidates: int) -> TuneSettings:
    return TuneSettings(candidates=candidates, quiet=True)


@pytest.fixture(scope="module")
def real() -> tuple[nn.Module, Tensor, Tensor]:
    """The embedded classifier and some of its images, with their labels."""
    pixels, labels = read_split(classifier.IMAGES, "val")
    images = (torch.tensor(pixels[:24]).unsqueeze(1) / 255 - 0.2860) / 0.3530
    return timm.create_model(classifier.NAME, pretrained=True).eval(), images, torch.tensor(labels[:24]).long()


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
    """Time follows from GFLOPs alone, but not in proportion to them."""

    def times(self: Subject, configs: Sequence[agglo.ReductionConfig], repeats: int) -> list[list[float]]:
        costs = [self.cost(config) for config in configs]
        return [[0.12 + 0.85 * cost.gflops**1.2] * repeats for cost in costs]

    monkeypatch.setattr(Subject, "times", times)
    monkeypatch.setattr(Subject, "seconds_of_dense", lambda self: 0.01)


def test_what_is_found_is_what_is_told(
    real: tuple[nn.Module, Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_LEAST_SECONDS", 0.0)
    model, images, labels = real
    path = tmp_path / "tuned.json"
    tuned = agglo.tune(model, images, gflops=0.5, labels=labels, batch_size=8, path=path, settings=few(2))
    assert agglo.report(model) is None and not model.training

    # Recomputed from the config alone, on the images that were kept apart.
    unseen = split(images, labels, batch_size=8).confirmation
    inputs, classes = (torch.cat([getattr(batch, name) for batch in unseen]) for name in ("inputs", "labels"))
    with torch.inference_mode():
        dense = model(inputs)
        agglo.apply(model, tuned.config)
        found = agglo.report(model)
        reduced = model(inputs)
        agglo.remove(model)
    expected = F.kl_div(reduced.log_softmax(1), dense.log_softmax(1), log_target=True, reduction="none").sum(1)
    assert tuned.quality.images == len(inputs) == 12
    assert tuned.quality.distance == pytest.approx(float(expected.mean()), rel=1e-3)
    assert tuned.quality.differing == int((dense.argmax(1) != reduced.argmax(1)).sum())
    right = [(logits.argmax(1) == classes).float().mean() for logits in (dense, reduced)]
    assert tuned.drop is not None and tuned.drop.points == pytest.approx(100 * float(right[0] - right[1]), abs=1e-3)
    assert found is not None and found.gflops_after is not None
    assert tuned.gflops == pytest.approx(found.gflops_after / found.gflops_before) and 0.4 < tuned.gflops <= 0.5

    content = json.loads(path.read_text())
    assert content["config"] == content["chosen"]["config"] == tuned.config.to_dict()
    assert [each["method"] for each in (content["chosen"], *content["beside"])] in (["atc", "tome"], ["tome", "atc"])
    alike = [point["search"]["total"] for point in tuned.front if 0.45 < point["gflops"] <= 0.5]
    assert len(alike) >= 2 and content["chosen"]["search"]["total"] == min(alike)
    assert tuned.speedup > 0 and all(point["speed"]["low"] <= point["speed"]["high"] for point in tuned.front)

    report = tuned.report()
    for part in ("0.5 of the dense model's GFLOPs", "kept: ", "atc", "tome", "agglo.apply("):
        assert part in report
    tuned.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert agglo.tuning.Tuned.load(path).content == tuned.content
    agglo.apply(model, tuned=path)
    assert agglo.report(model) == found
    agglo.remove(model)


@pytest.mark.usefixtures("_no_clock")
def test_a_search_that_was_stopped_goes_on_to_the_same_end(
    small: nn.Module, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(path: Path, **changes: Any) -> agglo.tuning.Tuned:
        how: dict[str, Any] = {"gflops": 0.6, "batch_size": 6, "settings": few(4), **changes}
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
    assert agglo.report(small) is None
    left = json.loads((tmp_path / "stopped.json").read_text())
    assert left["config"] is None and 0 < len(left["steps"]) < len(whole.content["steps"])
    with pytest.raises(ValueError, match="stopped"):
        agglo.apply(small, tuned=tmp_path / "stopped.json")
    evaluate, evaluations = Subject.quality, 0

    def counted(self: Subject, *arguments: Any) -> Any:
        nonlocal evaluations
        evaluations += 1
        return evaluate(self, *arguments)

    monkeypatch.setattr(Subject, "quality", counted)
    again = tune(tmp_path / "stopped.json")
    assert again.config == whole.config and again.content["front"] == whole.content["front"]
    steps, expected, done = (
        [(step["cell"], step["found"]) for step in content["steps"] if step["kind"] == "quality"]
        for content in (again.content, whole.content, left)
    )
    assert steps == expected and evaluations == len(steps) - len(done)
    evaluations = 0
    assert tune(tmp_path / "stopped.json").config == whole.config and evaluations == 0
    with pytest.raises(ValueError, match=r"target\.value: 0.6 there, 0.5 now"):
        tune(tmp_path / "stopped.json", gflops=0.5)


@pytest.mark.usefixtures("_no_clock")
def test_a_speed_is_met_and_hardly_passed(small: nn.Module, images: Tensor) -> None:
    tuned = agglo.tune(small, images, speedup=1.5, batch_size=6, settings=few(4))
    assert 1.5 <= tuned.speedup < 1.65
    assert "kept: " in tuned.report()
    for each in tuned.content["beside"]:
        assert each["speed"]["median"] >= 1.5
    with pytest.raises(ValueError, match="50 times as fast"):
        agglo.tune(small, images, speedup=50, batch_size=6, settings=few(2))


@pytest.mark.usefixtures("_no_clock")
def test_without_labels_a_drop_is_of_decisions_and_told_so(small: nn.Module, images: Tensor) -> None:
    tuned = agglo.tune(small, images, max_drop=40.0, batch_size=6, settings=few(3))
    assert tuned.speedup > 1 and tuned.drop is None and tuned.quality.disagreement is not None
    assert "decisions" in tuned.report()


def test_the_clock_is_of_turns_with_the_dense_model(small: nn.Module, images: Tensor) -> None:
    timed = Subject(small, split(images, batch_size=6), TuneSettings())
    assert (timed.objective, timed.decides, timed.tokens, timed.depth) == ("kl", True, 49, 4)
    ran: list[int | None] = []
    small.register_forward_pre_hook(lambda module, inputs: ran.append(_tokens_left(module)))
    timed._passes = 1
    configs = ["atc:schedule=(counts:10,blocks=[0])", "tome:keep_rate=0.9"]
    found = timed.times([agglo.ReductionConfig.parse(text) for text in configs], 2)
    assert ran == [*[None, 10, 35] * 2, 35, 10, None]
    assert len(found) == 2 and all(len(of_one) == 2 and min(of_one) > 0 for of_one in found)
    assert agglo.report(small) is None


def test_as_many_tokens_stay_as_the_level_allows(small: nn.Module, images: Tensor) -> None:
    timed = Subject(small, split(images, batch_size=6), TuneSettings())
    space = space_of("tome", depth=4, tries=lambda config: None)
    points = []
    for candidate in (space.first(), *space.around(space.first())):
        with suppress(ValueError):  # some begin too late to save so much
            points.append(solve(timed, space, candidate, 0.7))
    assert len(points) >= 5
    for point in points:
        assert 0.66 < point.cost.gflops <= 0.7
        agglo.apply(small, point.config)
        found = agglo.report(small)
        assert found is not None and found.counts == point.cost.counts
        agglo.remove(small)
    with pytest.raises(ValueError, match="tome cannot"):
        solve(timed, space, space.first(), 0.01)


def _tokens_left(module: nn.Module) -> int | None:
    found = agglo.report(module)
    return None if found is None or found.counts is None else found.counts[-1]


def test_embeddings_are_compared_by_their_error(images: Tensor) -> None:
    torch.manual_seed(0)
    model = agglo_test_vit(num_classes=0).eval()
    tuned = agglo.tune(model, images, gflops=0.7, methods=["tome"], batch_size=6, settings=few(2))
    assert tuned.content["settings"]["objective"] == "relative" and 0 < tuned.quality.distance < 2
    assert tuned.quality.differing is None and tuned.config.method == "tome"
    with pytest.raises(ValueError, match=r"max_drop=1.0"):
        agglo.tune(model, images, max_drop=1.0)


def test_a_function_of_the_users_says_what_is_compared_and_how(small: nn.Module, images: Tensor) -> None:
    def tokens(model: Any, batch: Tensor) -> Tensor:
        return model.forward_features(batch)

    def worst(dense: Any, reduced: Any) -> Tensor:
        return (dense - reduced).abs().flatten(1).amax(1)

    settings = TuneSettings(objective=worst, candidates=2, quiet=True)
    tuned = agglo.tune(small, images, gflops=0.7, output=tokens, methods=["tome"], batch_size=6, settings=settings)
    assert tuned.content["settings"]["objective"] == "worst" and tuned.quality.distance > 0
    with pytest.raises(ValueError, match="output="):
        agglo.tune(small, images, gflops=0.7, output=lambda model, batch: model.patch_embed(batch))
    with pytest.raises(ValueError, match="int"):
        agglo.tune(small, images, gflops=0.7, output=lambda model, batch: 7)


@pytest.mark.usefixtures("_no_clock")
def test_a_diffusion_model_is_tuned_by_the_noise_it_predicts() -> None:
    model, inputs = dit()
    batches = [{**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])} for _ in range(4)]
    tuned = agglo.tune(model, batches, gflops=0.6, settings=few(2))
    assert tuned.content["settings"]["objective"] == "relative"
    assert isinstance(tuned.config.keep_rate, float) and 0 < tuned.config.keep_rate < 1
    assert {point["method"] for point in tuned.front} == {"atc", "tomesd"}
    agglo.apply(model, tuned.config)
    found = agglo.report(model)
    assert found is not None and found.gflops_after is not None
    assert found.gflops_after <= 0.6 * found.gflops_before
    assert tuned.gflops == pytest.approx(found.gflops_after / found.gflops_before)


@pytest.mark.usefixtures("_no_clock")
def test_a_detector_is_tuned_by_its_pyramid_on_images_of_several_sizes() -> None:
    from agglo.lab.tasks.detection.specs import DetectorSpec

    torch.manual_seed(0)
    parts = ("backbone_options", "adapter_options", "head_options")
    spec = DetectorSpec(SMALL_MODEL["model"], 2, **{part: SMALL_MODEL[part] for part in parts}, image_size=64)
    model = spec.build().eval()
    images = [torch.rand(3, 48 + 16 * (number % 2), 64) for number in range(6)]
    tuned = agglo.tune(model, images, gflops=0.9, methods=["atc"], batch_size=1, settings=few(2))
    assert isinstance(tuned.config.schedule, agglo.Stages) and tuned.content["settings"]["objective"] == "relative"
    seen = split(images, batch_size=1).confirmation[0].inputs
    with torch.inference_mode():
        before = submodule_output("neck")(model, seen)
        agglo.apply(model, tuned.config)
        after = submodule_output("neck")(model, seen)
    assert len(before) == len(after) > 1 and not torch.equal(before[0], after[0])


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({}, "not none"),
        ({"speedup": 2, "gflops": 0.5}, "not speedup and gflops"),
        ({"speedup": 1.0}, "speedup=1.0"),
        ({"max_drop": 0}, "max_drop=0"),
        ({"gflops": True}, "gflops=True"),
        ({"gflops": 0.5, "methods": ["nobody"]}, "'nobody'"),
        ({"gflops": 0.5, "methods": "atc"}, "methods='atc'"),
        ({"gflops": 0.5, "methods": ["dynamicvit"]}, "'dynamicvit' learns"),
        ({"gflops": 0.5, "minutes": 0}, "minutes=0"),
        ({"gflops": 0.5, "path": "/nowhere/tuned.json"}, "/nowhere"),
        ({"gflops": 0.5, "settings": TuneSettings(tower="nothing")}, "nothing"),
        ({"gflops": 0.5, "settings": TuneSettings(objective="l2")}, "objective='l2'"),
    ],
)
def test_bad_arguments_are_refused(small: nn.Module, images: Tensor, how: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        agglo.tune(small, images, **how)
    assert agglo.report(small) is None


@pytest.mark.parametrize("bad", [{"candidates": 1}, {"n_tokens": 0}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        TuneSettings(**bad)


def test_models_that_cannot_be_tuned_are_refused(small: nn.Module, images: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="got str"):
        agglo.tune("deit", images, gflops=0.5)  # type: ignore[arg-type]
    agglo.apply(small, keep_rate=0.5)
    with pytest.raises(ValueError, match=r"agglo.remove"):
        agglo.tune(small, images, gflops=0.5)
    assert agglo.report(small) is not None


def test_the_command_writes_result_plot_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agglo.lab.cli import main

    output = tmp_path / "tuned.json"
    command = ["tune", classifier.NAME, "--pretrained", "--data", str(classifier.IMAGES), "--images", "16"]
    command += ["--method", "tome"]
    command += ["--gflops", "0.6", "--candidates", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu"]
    assert main([*command, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert output.with_suffix(".txt").read_text() == printed and "accuracy lost:" in printed
    assert output.with_suffix(".png").stat().st_size > 10_000
    tuned = agglo.tuning.Tuned.load(output)
    assert tuned.quality.images == 8 and tuned.content["model"]["name"] == classifier.NAME
    assert main([*command, "-o", str(tmp_path / "tuned.txt")]) == 2
    assert "must end in .json" in capsys.readouterr().err
    assert main([*command, "--seed", "1", "-o", str(output)]) == 2
    assert "settings.seed: 0 there, 1 now" in capsys.readouterr().err
