"""Every command with models of other libraries than timm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import agglo
from agglo.lab.cli import main
from agglo.lab.tasks.classification.data import open_split
from tests.support import tiny_models
from tests.support.tiny_models import NAMES

transformers = pytest.importorskip("transformers")
open_clip = pytest.importorskip("open_clip")
Image = pytest.importorskip("PIL.Image")

RUN = ("--workers", "0", "--batch-size", "5", "--device", "cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{tiny_models.vit_folder(tmp_path_factory.mktemp('vit'))}"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"open_clip:local-dir:{tiny_models.open_clip_folder(tmp_path_factory.mktemp('clip'))}"


def test_evaluate_a_folder_of_transformers(vit: str, data: Path, tmp_path: Path) -> None:
    """Against the library alone: its processor, its model, one image at a time."""
    path = tmp_path / "found.json"
    assert main(["evaluate", vit, "--data", str(data), "--keep-rate", "0.5", "--json", str(path), *RUN]) == 0
    report = json.loads(path.read_text())
    dense, reduced = report["results"]
    folder = vit.removeprefix("hf:")
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pictures = open_split("folder", data, "val")
    # Sorted by name, the folders are not in the order of the model's labels: only numbers are compared.
    for result, apply in ((dense, False), (reduced, True)):
        if apply:
            agglo.apply(model, keep_rate=0.5)
        right = 0
        for number in range(len(pictures)):
            picture, target = pictures[number]
            right += int(model(**processor(picture, return_tensors="pt")).logits.argmax()) == target
        assert result["top1"] == pytest.approx(100 * right / len(pictures)), result["name"]
    assert report["model"]["weights"] == "pretrained" and report["inputs"]["squash"]
    assert reduced["counts"][-1] < dense["counts"][-1] == 36


def test_evaluate_by_prompts(clip: str, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = ["evaluate", clip, "--zero-shot", "--data", str(data), "--json", str(path), *RUN]
    assert main([*command, "--keep-rate", "0.5"]) == 0
    report = json.loads(path.read_text())
    name = clip.removeprefix("open_clip:")
    own, _, prepare = open_clip.create_model_and_transforms(name)
    own.eval()
    texts = open_clip.get_tokenizer(name)([f"a photo of a {each}." for each in ("hen", "tench", "tree frog")])
    pictures = open_split("folder", data, "val")
    with torch.inference_mode():
        answers = [int(own.get_logits(prepare(image)[None], texts)[0].argmax()) for image, _ in pictures]  # type: ignore[attr-defined]
    right = sum(answer == pictures[number][1] for number, answer in enumerate(answers))
    assert report["results"][0]["top1"] == pytest.approx(100 * right / len(pictures))
    assert report["model"]["prompts"] == {"classes": ["hen", "tench", "tree frog"], "templates": ["a photo of a {}."]}


def test_evaluate_says_what_is_missing(
    clip: str, vit: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two.txt").write_text("hen\ntench\n", encoding="utf-8")
    for given, message in (
        ([clip], "no head"),
        ([clip, "--zero-shot", "--class-names", str(tmp_path / "two.txt")], "2 class names for the 3 classes"),
        ([clip, "--class-names", "openai"], "--class-names"),
        ([vit, "--zero-shot"], "vit"),
        (["google/vit-base-patch16-224"], "hf:PATH"),
    ):
        assert main(["evaluate", *given, "--data", str(data), *RUN]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("agglo: error: ") and message in said


def test_visualize_a_folder_and_prompts(vit: str, clip: str, data: Path, tmp_path: Path) -> None:
    photo = str(next((data / "val" / "hen").iterdir()))
    (tmp_path / "names.txt").write_text("\n".join(NAMES), encoding="utf-8")
    for output, given in (
        ("vit.png", ["--model", vit]),
        ("clip.png", ["--model", clip]),  # features have no answers
        ("prompts.png", ["--model", clip, "--zero-shot", "--class-names", str(tmp_path / "names.txt")]),
        ("vit.gif", ["--model", vit, "--keep-rate", "0.5"]),
    ):
        assert main(["visualize", photo, *given, "-o", str(tmp_path / output)]) == 0
        assert np.asarray(Image.open(tmp_path / output).convert("RGB")).std() > 10, output


def test_bench_models_of_two_libraries(vit: str, clip: str, tmp_path: Path) -> None:
    for number, name in enumerate((vit, clip)):
        path = tmp_path / f"{number}.json"
        command = ["bench", "model", "--model", name, "--batch-size", "2", "--repeats", "1", "--device", "cpu"]
        assert main([*command, "--keep-rate", "0.5", "--json", str(path)]) == 0
        [found] = json.loads(path.read_text())["runs"]
        assert found["settings"]["model"] == name
        assert found["results"][0]["counts"] == [36] * 4 and found["results"][-1]["counts"][-1] < 18


def test_tune_a_folder_and_a_tower_without_a_head(vit: str, clip: str, data: Path, tmp_path: Path) -> None:
    for number, (name, objective) in enumerate(((vit, "kl"), (clip, "relative"))):
        path = tmp_path / f"{number}.json"
        command = ["tune", name, "--data", str(data), "--gflops", "0.7", "--candidates", "2", "--method", "atc", *RUN]
        assert main([*command, "-o", str(path)]) == 0
        found = json.loads(path.read_text())
        assert found["settings"]["objective"] == objective and found["chosen"]["gflops"] <= 0.7


def test_finetune_and_evaluate_what_came_out(vit: str, data: Path, tmp_path: Path) -> None:
    """A head for other classes than the folder's: 3 there, 2 here."""
    two = tiny_models.write_images(tmp_path / "two", ("cat", "dog"), each=4)
    settings = ["epochs=1", "batch_size=4", "drop_path=0", "mixup=0", "cutmix=0", "warmup_epochs=0", "workers=0"]
    command = ["finetune", "deit", "--model", vit, "--dataset", "folder", "--data", str(two)]
    command += ["--output", str(tmp_path / "run"), "--method", "atc", "--keep-rate", "0.5", "--set", *settings]
    assert main(command) == 0
    best = tmp_path / "run" / "best" / "model.safetensors"
    path = tmp_path / "found.json"
    given = ["--checkpoint", str(best), "--keep-rate", "0.5", "--no-dense", "--json", str(path)]
    assert main(["evaluate", vit, *given, "--data", str(two), *RUN]) == 0
    [result] = json.loads(path.read_text())["results"]
    row = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["top1"] == pytest.approx(row["best_metric"])
