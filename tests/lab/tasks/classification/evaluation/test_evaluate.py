"""agglo evaluate: what it prints, what it writes, and how it resumes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import binomtest

import agglo
from agglo.lab.cli import main
from agglo.lab.evaluation.report import sampling_error
from agglo.lab.tasks.classification.data import open_split
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation import grid as evaluation_grid
from agglo.lab.tasks.classification.evaluation.grid import evaluate
from agglo.models.checkpoints import read_checkpoint
from agglo.tuned import FORMAT
from tests.support.clocks import Clock
from tests.support.data import data_path

timm = pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")

MODEL = "test_vit"  # 160 pixels, 100 patches, 6 blocks
CLASSES = 7


def save_image(path: Path, generator: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((200, 180), Image.Resampling.BICUBIC).save(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 images in 7 class folders."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for number in range(17):
        save_image(root / "val" / f"class{number % CLASSES}" / f"{number}.png", generator)
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights whose answers depend on the image."""
    torch.manual_seed(2)
    model = timm.create_model(MODEL, num_classes=CLASSES)
    torch.nn.init.normal_(model.head.weight, std=1.0)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(model.state_dict(), path)
    return path


def reference(checkpoint: Path, data: Path, **reduction: Any) -> float:
    """Top-1 in percent, one image at a time."""
    model = evaluation_grid.build(evaluation_grid.ModelSpec(MODEL, checkpoint))
    return top1_one_by_one(agglo.apply(model, **reduction) if reduction else model, data)


def top1_one_by_one(model: Any, data: Path) -> float:
    images = open_split("folder", data, "val", transform=evaluation_transform(inputs_for(model, "folder")))
    with torch.inference_mode():
        right = [int(model(images[n][0][None]).argmax()) == images[n][1] for n in range(len(images))]
    return 100 * float(np.mean(right))


def command(data: Path, checkpoint: Path, *more: str) -> list[str]:
    given = ["--checkpoint", str(checkpoint), "--data", str(data), "--batch-size", "5", "--workers", "0"]
    return ["evaluate", MODEL, *given, *more]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_batch_that_is_alone_is_timed_when_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class SlowAtFirst(torch.nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            clock.advance(8.0 if self.calls == 1 else 0.5)
            return super().forward(inputs)

    for batches, calls in ((1, 2), (3, 3)):
        model = SlowAtFirst(2, 2)
        found = evaluate(model, [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))] * batches)
        assert found["images"] == 4 * batches and model.calls == calls
        assert found["images_per_second"] == 8


def test_a_grid_in_a_table_a_file_and_a_plot(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--method", "atc", "tome", "--linkage", "complete", "average", "--keep-rate", "0.5", "0.25"]
    files = ["--json", str(tmp_path / "grid.json"), "--plot", str(tmp_path / "grid.png")]
    out, _ = run(capsys, *command(data, checkpoint, *grid, *files))
    content = json.loads((tmp_path / "grid.json").read_text())
    found = {(result["name"], keep_rate_of(result)): result for result in content["results"]}
    assert list(found) == [
        ("dense", None),
        ("atc complete", 0.5),
        ("atc average", 0.5),
        ("tome", 0.5),
        ("atc complete", 0.25),
        ("atc average", 0.25),
    ]
    assert found["dense", None]["top1"] == pytest.approx(reference(checkpoint, data))
    assert found["atc average", 0.25]["top1"] == pytest.approx(reference(checkpoint, data, keep_rate=0.25))
    assert found["tome", 0.5]["top1"] == pytest.approx(reference(checkpoint, data, method="tome", keep_rate=0.5))
    assert found["dense", None]["counts"] == [100] * 6
    assert found["atc average", 0.5]["counts"] == [100, 50, 50, 25, 12, 12]
    # ToMe cannot take more than half: 25 become 13, and that is what is shown.
    assert found["tome", 0.5]["counts"][-1] == 13
    assert found["dense", None]["gflops"] > found["atc average", 0.5]["gflops"]
    (cannot,) = content["cannot"]
    assert cannot["name"] == "tome" and keep_rate_of(cannot) == 0.25 and "at least 50 stay" in cannot["cannot"]
    assert content["data"]["name"] == "folder" and content["data"]["images"] == 17
    assert "17 images of 7 classes" in out
    assert "cannot: tome at 0.25: " in out and "100 50 25 13" in out
    assert [line.split() for line in out.splitlines() if line.startswith("tome")] == [
        ["tome", f"{found['tome', 0.5]['top1']:.2f}", "cannot"]
    ]
    with Image.open(tmp_path / "grid.png") as plot:
        assert plot.width > 800 and len(np.unique(np.asarray(plot).reshape(-1, plot.height), axis=0)) > 10


def test_a_stopped_run_goes_on_and_finds_the_same(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = command(data, checkpoint, "--method", "atc", "random", "--keep-rate", "0.7", "0.5")
    # Images are kept in memory here, and read again for every cell below.
    run(capsys, *grid, "--json", str(tmp_path / "whole.json"))
    grid += ["--cache", "0"]
    passes = 0

    def until_the_third(*arguments: Any, **settings: Any) -> dict[str, Any]:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise KeyboardInterrupt
        return evaluate(*arguments, **settings)

    torn = tmp_path / "torn.json"
    monkeypatch.setattr(evaluation_grid, "evaluate", until_the_third)
    assert main([*grid, "--json", str(torn)]) == 130
    before = json.loads(torn.read_text())["results"]
    assert len(before) == 2
    run(capsys, *grid, "--json", str(torn))
    after = json.loads(torn.read_text())["results"]
    assert after[:2] == before and passes == 3 + 3
    whole = json.loads((tmp_path / "whole.json").read_text())["results"]
    assert [without_times(result) for result in after] == [without_times(result) for result in whole]
    # More may be asked.
    run(capsys, *command(data, checkpoint, "--keep-rate", "0.9", "--json", str(torn)))
    assert passes == 7 and len(json.loads(torn.read_text())["results"]) == 6


def keep_rate_of(result: dict[str, Any]) -> float | None:
    return None if result["config"] is None else result["config"]["keep_rate"]


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("images_per_second", "date")}


def test_another_evaluation_is_not_continued(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dense.json"
    mine = command(data, checkpoint, "--json", str(path))
    run(capsys, *mine)
    written = path.read_text()
    other = tmp_path / "other.safetensors"
    save_file({n: v + 1 for n, v in read_checkpoint(checkpoint).items()}, other)
    for changed, message in (
        ([*mine, "--batch-size", "4"], "settings.batch_size: 5 there, 4 now"),
        ([*mine, "--crop-pct", "1"], "inputs.crop"),
        ([*command(data, other), "--json", str(path)], "model.fingerprint"),
    ):
        assert main(changed) == 2
        assert message in capsys.readouterr().err
    assert path.read_text() == written
    path.write_text("[]")
    assert main(mine) == 2
    assert "not a journal" in capsys.readouterr().err


def test_a_bad_image_stops_the_run_and_is_named(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    shutil.copy(next(data.rglob("*.png")), tmp_path / "a")
    for name in "bcdefg":
        (tmp_path / name).mkdir()
        (tmp_path / name / "bad.jpg").write_text("no image")
    assert main(command(tmp_path, checkpoint)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("agglo: error: image '") and "b/bad.jpg' cannot be read" in error


def test_other_budgets_than_keep_rates(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, values, titles in (
        ("schedule", ["linear:9", "linear:4", "constant:9"], "top-1 constant:9 linear:4 linear:9"),
        ("threshold", ["0.5", "0.01"], "top-1 0.01 0.5"),
    ):
        path = tmp_path / f"{kind}.json"
        arguments = ["--linkage", "average", "complete", "--no-dense", "--images", "6", "--json", str(path)]
        out, _ = run(capsys, *command(data, checkpoint, f"--{kind}", *values, *arguments))
        assert titles.split() in [line.split() for line in out.splitlines()], out
        configs = [agglo.ReductionConfig.from_dict(each["config"]) for each in json.loads(path.read_text())["results"]]
        linkages = [(value, linkage) for value in values for linkage in ("average", "complete")]
        assert [(str(getattr(config, kind)), config.create_method().linkage) for config in configs] == linkages


def test_models_and_data_that_do_not_match_are_refused(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["evaluate", MODEL, "--data", str(data)], "1000 classes"),
        (command(tmp_path, checkpoint), "no data set"),
        (command(data, checkpoint, "--dataset", "cifar"), "dataset='cifar'"),
        (command(data, checkpoint, "--crop-pct", "2"), "crop_pct=2.0"),
        (command(data, checkpoint, "--no-dense"), "--no-dense"),
        (command(data, checkpoint, "--method", "tome", "--keep-rate", "0.3"), "from 100 to 30"),
        (command(data, checkpoint, "--keep-rate", "0.5", "--option", "speed=1"), "speed=1"),
        (command(data, checkpoint, "--method", "evit"), "--method"),
        (command(data, checkpoint, "--json", str(tmp_path)), "no regular file"),
        (command(data, checkpoint, "--plot", "a.txt"), "'a.txt'"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("agglo: error: ") and message in error, error


def test_options_reach_the_methods(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--method", "kmedoids", "atc", "--keep-rate", "0.5", "--option", "iterations=2", "--features", "values"]
    more += ["--proportional", "off", "--blocks", "2", "--last-block", "class_token", "--no-dense"]
    out, _ = run(capsys, *command(data, checkpoint, *more, "--json", str(tmp_path / "found.json")))
    assert all(part in out for part in ("iterations=2", "blocks=[2]", "proportional=false"))
    kmedoids, atc = json.loads((tmp_path / "found.json").read_text())["results"]
    options = {"keep_rate": 0.5, "features": "values", "proportional": False, "blocks": [2]}
    options["last_block"] = "class_token"
    assert kmedoids["config"]["iterations"] == 2
    assert atc["config"] == agglo.ReductionConfig.of("atc", **options).to_dict()
    assert atc["top1"] == pytest.approx(reference(checkpoint, data, **options))


def test_what_tune_found_is_evaluated_beside_the_others(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = agglo.ReductionConfig.parse(
        "atc:schedule=(counts:60,30,blocks=[2,4]),linkage=complete,features=tokens,place=before_block"
    )
    tuned, path = tmp_path / "fast.json", tmp_path / "found.json"
    tuned.write_text(json.dumps({"format": FORMAT, "config": config.to_dict()}))
    asked = command(data, checkpoint, "--keep-rate", "0.5", "--tuned", str(tuned), "--json", str(path))
    run(capsys, *asked, "--plot", str(tmp_path / "both.png"))
    results = {result["name"]: result for result in json.loads(path.read_text())["results"]}
    assert results.keys() == {"dense", "atc average", "tuned fast"}
    assert results["tuned fast"]["counts"] == [100, 100, 60, 60, 30, 30]
    assert results["tuned fast"]["top1"] == pytest.approx(reference(checkpoint, data, **config.given()))
    assert main(command(data, checkpoint, "--tuned", str(tmp_path / "none.json"))) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_learned_method_needs_its_weights_and_uses_them(
    data: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--method", "sit", "atc", "--keep-rate", "0.5", "--json"]
    out, _ = run(capsys, *command(data, checkpoint, *grid, str(tmp_path / "without.json")))
    assert "cannot: sit at 0.5: " in out
    torch.manual_seed(4)
    model = evaluation_grid.build(evaluation_grid.ModelSpec(MODEL, checkpoint))
    agglo.apply(model, "sit", keep_rate=0.5)
    learned = tmp_path / "learned.pth"
    torch.save({"model": model.state_dict()}, learned)
    run(capsys, *command(data, learned, *grid, str(tmp_path / "with.json")))
    found = {result["name"]: result for result in json.loads((tmp_path / "with.json").read_text())["results"]}
    assert found["sit"]["top1"] == pytest.approx(top1_one_by_one(model, data))
    assert found["atc average"]["top1"] == pytest.approx(reference(checkpoint, data, keep_rate=0.5))


def test_real_weights_on_real_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 images: 72 % have a standard error of 7 points, and a wrong label order or normalisation gives about 0."""
    weights, images = data_path("deit_tiny_patch16_224.safetensors"), data_path("imagenet-val-2k")
    name = "deit_tiny_patch16_224"
    given = ["--checkpoint", str(weights), "--data", str(images), "--images", "40", "--keep-rate", "0.5"]
    out, _ = run(capsys, "evaluate", name, *given, "--json", str(tmp_path / "found.json"))
    dense, reduced = json.loads((tmp_path / "found.json").read_text())["results"]
    assert "imagenet" in out and "40 images of 1000 classes" in out
    assert abs(dense["top1"] - 72.8) < 4 * sampling_error(72.8, 40) and dense["top5"] > dense["top1"]
    assert abs(reduced["top1"] - 69.8) < 4 * sampling_error(69.8, 40)
    assert sorted(set(reduced["counts"]), reverse=True) == [196, 98, 49, 24]
    assert dense["gflops"] == pytest.approx(1.25, abs=0.05)


@pytest.mark.parametrize(("right", "images"), [(0, 4), (1, 1), (360, 500)])
def test_the_sampling_error_is_half_of_wilsons_interval(right: int, images: int) -> None:
    one_deviation = math.erf(1 / math.sqrt(2))
    interval = binomtest(right, images).proportion_ci(one_deviation, method="wilson")
    found = sampling_error(100 * right / images, images)
    assert found > 0
    assert found == pytest.approx(100 * (interval.high - interval.low) / 2)
