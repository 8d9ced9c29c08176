"""`agglo.tune` on real models: results hold on images the search did not see, and a stopped search continues."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import agglo
from agglo.embedded import classifier
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.data.fashion_mnist import read_split
from agglo.tuning import Tuned, TuneSettings, search, subject, submodule_output
from agglo.tuning.images import split
from agglo.tuning.result import Quality
from agglo.tuning.search import Search
from agglo.tuning.settings import Target
from agglo.tuning.space import Space
from agglo.tuning.subject import Cost, Subject
from agglo.utils.journal import Journal
from tests.support.detection import SMALL_MODEL
from tests.support.diffusion import dit
from tests.support.fashion import agglo_test_vit

timm = pytest.importorskip("timm")

FEW = TuneSettings(candidates=2, batch_size=6, quiet=True)
TOME = replace(FEW, methods=["tome"])


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


def test_what_is_found_is_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (subject, "_LEAST_SECONDS", 0.0),
        (search, "_FINAL_TURNS", 2),
        (search, "_FRONT", (0.5,)),
    ):
        monkeypatch.setattr(module, name, value)
    pixels, of_all = read_split(classifier.IMAGES, "val")
    images, labels = (torch.tensor(pixels[:24]).unsqueeze(1) / 255 - 0.2860) / 0.3530, torch.tensor(of_all[:24]).long()
    model = timm.create_model(classifier.NAME, pretrained=True).eval()
    path = tmp_path / "tuned.json"
    tuned = agglo.tune(model, [(images, labels)], gflops=0.5, path=path, settings=FEW)
    assert agglo.report(model) is None and not model.training

    # Recomputed from the config alone, on the images that were kept apart.
    unseen = split([(images, labels)], batch_size=6).confirmation
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
    drop = tuned.quality.drop
    assert drop is not None and drop.points == pytest.approx(100 * float(right[0] - right[1]), abs=1e-3)
    assert found is not None and found.gflops_after is not None
    assert tuned.gflops == pytest.approx(found.gflops_after / found.gflops_before) and 0.4 < tuned.gflops <= 0.5

    content = json.loads(path.read_text())
    assert content["config"] == content["chosen"]["config"] == tuned.config.to_dict()
    assert [each["method"] for each in (content["chosen"], *content["beside"])] in (["atc", "tome"], ["tome", "atc"])
    alike = [point["search"]["total"] for point in content["front"] if 0.45 < point["gflops"] <= 0.5]
    assert len(alike) >= 2 and content["chosen"]["search"]["total"] == min(alike)
    assert tuned.speedup > 0 and all(point["speed"]["low"] <= point["speed"]["high"] for point in content["front"])

    report = tuned.report()
    for part in ("0.5 of the dense model's GFLOPs", "kept: ", "atc", "tome", "agglo.apply("):
        assert part in report
    tuned.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert Tuned.load(path).content == tuned.content


def test_the_best_of_all_candidates_is_found_by_halving() -> None:
    features, linkages = ("tokens", "keys", "keys_per_head", "values"), ("average", "complete", "single")
    distance = dict(zip(product(features, linkages), [5, 9, 3, 12, 1, 8, 11, 2, 7, 4, 10, 6], strict=True))
    evaluated: list[tuple[Any, int]] = []

    def quality(config: agglo.ReductionConfig, batches: Sequence[None]) -> Quality:
        assert config.keep_rate == pytest.approx(0.4, abs=0.01)
        options = config.create_method().options()
        key = options["features"], options["linkage"]
        evaluated.append((key, len(batches)))
        return Quality(len(batches), distance[key] * len(batches), 0.0)

    stub: Any = SimpleNamespace(images=SimpleNamespace(search=[None] * 4), quality=quality)
    stub.cost = lambda config: Cost(config.keep_rate, [1])
    stub.share = lambda config: config.keep_rate
    axes = {"features": tuple({"features": each} for each in features)}
    axes["linkage"] = tuple({"linkage": each} for each in linkages)
    settings = TuneSettings(candidates=12, quiet=True)
    journal = Journal(None, {"machine": {"cpu": "a CPU", "gpu": None}})
    halving = Search(stub, [Space("atc", axes, {})], Target("gflops", 0.4), journal, settings, 1.0)
    best = halving._best_of(halving.spaces[0])
    assert best is not None and distance[features[best[0]], linkages[best[1]]] == min(distance.values())
    ranked = sorted(distance, key=lambda key: distance[key])
    assert [batches for _, batches in evaluated] == [1] * 12 + [1] * 6 + [2] * 3  # each round adds to those before
    assert {key for key, _ in evaluated[-3:]} == set(ranked[:3])


@pytest.mark.usefixtures("_no_clock")
def test_a_search_that_was_stopped_goes_on_to_the_same_end(
    small: nn.Module, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(path: Path, gflops: float = 0.6) -> Tuned:
        return agglo.tune(small, images, path=path, gflops=gflops, settings=FEW)

    whole = tune(tmp_path / "whole.json")
    assert whole.quality.distance > 0
    replace, writes = os.replace, 0

    def interrupted(source: Any, target: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == 5:
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
    tuned = agglo.tune(small, images, speedup=1.5, settings=FEW)
    assert 1.5 <= tuned.speedup < 1.65
    assert "kept: " in tuned.report()
    for each in tuned.content["beside"]:
        assert each["speed"]["median"] >= 1.5
    with pytest.raises(ValueError, match="50 times as fast"):
        agglo.tune(small, images, speedup=50, settings=TOME)


@pytest.mark.usefixtures("_no_clock")
def test_without_labels_a_drop_is_of_decisions_and_told_so(small: nn.Module, images: Tensor) -> None:
    tuned = agglo.tune(small, images, max_drop=40.0, settings=TOME)
    lost = Quality(**tuned.content["chosen"]["search"]).loss.points
    assert tuned.speedup > 1 and lost <= 40.0 and tuned.quality.drop is None
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


def _tokens_left(module: nn.Module) -> int | None:
    found = agglo.report(module)
    return None if found is None or found.counts is None else found.counts[-1]


@pytest.mark.usefixtures("_no_clock")
def test_embeddings_and_outputs_of_the_users_are_compared_by_their_error(small: nn.Module, images: Tensor) -> None:
    torch.manual_seed(0)
    model = agglo_test_vit(num_classes=0).eval()
    tuned = agglo.tune(model, images, gflops=0.7, settings=TOME)
    assert tuned.content["settings"]["objective"] == "relative" and 0 < tuned.quality.distance < 2
    assert tuned.quality.differing is None and tuned.config.method == "tome"
    with pytest.raises(ValueError, match=r"max_drop=1.0"):
        agglo.tune(model, images, max_drop=1.0)
    tokens = replace(TOME, output=lambda model, batch: model.forward_features(batch))
    assert agglo.tune(small, images, gflops=0.7, settings=tokens).quality.distance > 0
    for output, named in ((lambda model, batch: model.patch_embed(batch), "output="), (lambda model, batch: 7, "int")):
        with pytest.raises(ValueError, match=named):
            agglo.tune(small, images, gflops=0.7, settings=TuneSettings(output=output))


@pytest.mark.usefixtures("_no_clock")
def test_a_diffusion_model_is_tuned_by_the_noise_it_predicts() -> None:
    model, inputs = dit()
    batches = [{**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])} for _ in range(4)]
    tuned = agglo.tune(model, batches, gflops=0.6, settings=replace(FEW, batch_size=None))
    assert tuned.content["settings"]["objective"] == "relative"
    assert isinstance(tuned.config.keep_rate, float) and 0 < tuned.config.keep_rate < 1
    assert {point["method"] for point in tuned.content["front"]} == {"atc", "tomesd"}
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
    pyramid = submodule_output("neck")
    settings = replace(FEW, methods=["atc"], batch_size=1, output=pyramid)
    tuned = agglo.tune(model, images, gflops=0.9, settings=settings)
    assert tuned.content["settings"]["objective"] == "relative"
    seen = split(images, batch_size=1).confirmation[0].inputs
    with torch.inference_mode():
        before = pyramid(model, seen)
        agglo.apply(model, tuned.config)
        after = pyramid(model, seen)
    assert len(before) == len(after) > 1 and not torch.equal(before[0], after[0])


@pytest.mark.parametrize(
    ("how", "settings", "named"),
    [
        ({}, {}, "not none"),
        ({"speedup": 2, "gflops": 0.5}, {}, "not speedup and gflops"),
        ({"speedup": 1.0}, {}, "speedup=1.0"),
        ({"gflops": True}, {}, "gflops=True"),
        ({"gflops": 0.5, "minutes": 0}, {}, "minutes=0"),
        ({"gflops": 0.5, "path": "/nowhere/tuned.json"}, {}, "/nowhere"),
        ({"gflops": 0.5}, {"tower": "nothing"}, "nothing"),
        ({}, {"candidates": 1}, "candidates=1"),
        ({}, {"methods": "atc"}, "methods='atc'"),
        ({}, {"methods": ["dynamicvit"]}, "'dynamicvit' learns"),
    ],
)
def test_bad_arguments_are_refused(
    small: nn.Module, images: Tensor, how: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        agglo.tune(small, images, **how, settings=TuneSettings(**settings))
    assert agglo.report(small) is None


def test_models_that_cannot_be_tuned_are_refused(small: nn.Module, images: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="got str"):
        agglo.tune("deit", images, gflops=0.5)  # type: ignore[arg-type]
    agglo.apply(small, keep_rate=0.5)
    with pytest.raises(ValueError, match=r"agglo.remove"):
        agglo.tune(small, images, gflops=0.5)
    assert agglo.report(small) is not None


@pytest.mark.usefixtures("_no_clock")
def test_the_command_writes_result_plot_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agglo.lab.cli import main

    output = tmp_path / "tuned.json"
    command = ["tune", classifier.NAME, "--pretrained", "--data", str(classifier.IMAGES), "--images", "16"]
    command += ["--method", "tome"]
    command += ["--gflops", "0.6", "--candidates", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu"]
    assert main([*command, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert output.with_suffix(".txt").read_text() == printed and "accuracy lost" in printed
    assert output.with_suffix(".png").stat().st_size > 10_000
    tuned = Tuned.load(output)
    assert tuned.quality.images == 8 and tuned.content["model"]["name"] == classifier.NAME
    assert main([*command, "-o", str(tmp_path / "tuned.txt")]) == 2
    assert "must end in .json" in capsys.readouterr().err
    assert main([*command, "--seed", "1", "-o", str(output)]) == 2
    assert "settings.seed: 0 there, 1 now" in capsys.readouterr().err
