"""agglo detect: a detector learns a few images by heart, is evaluated dense and reduced, and shows what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from agglo.cli import main
from agglo.detection.specs import open_detector
from agglo.detection.training.trainer import train_detector
from agglo.experiments.files import save_weights
from tests.support.detection import SMALL_MODEL, quick_detection, write_coco
from tests.support.fashion import log

IMAGES = 4
COMMON = ("--split", "train", "--images", str(IMAGES), "--device", "cpu", "--workers", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("coco") / "data", n_train=IMAGES)


@pytest.fixture(scope="module")
def learned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a detector that knows four images."""
    output = tmp_path_factory.mktemp("learned") / "run"
    recipe = output.with_suffix(".toml")
    settings = quick_detection(
        images=IMAGES,
        epochs=24,
        evaluate_every=8,
        batch_size=4,
        lr_batch=4,
        lr=2e-3,
        warmup_steps=5,
        lr_drops=[],
        flip=0.0,
        checkpoint_minutes=60.0,
    )
    recipe.write_text("[settings]\n" + "\n".join(_lines(vars(settings))))
    assert main(["detect", "train", str(recipe), "--data", str(data), "--output", str(output)]) == 0
    return output


def _lines(values: dict[str, Any]) -> list[str]:
    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
        return json.dumps("none" if value is None else value)

    return [f"{name} = {toml(value)}" for name, value in values.items()]


def evaluate(model: Path | str, data: Path, *more: str) -> int:
    return main(["detect", "evaluate", str(model), "--data", str(data), *COMMON, *more])


def test_a_few_images_are_learned_by_heart(learned: Path) -> None:
    rows = log(learned)
    losses, found = ([float(row[name]) for row in rows] for name in ("train_loss", "box_AP"))
    assert losses[-1] < 0.7 * losses[0] and found[-1] > found[0] + 5, (losses, found)
    assert float(rows[-1]["mask_AP"]) > 5


def test_a_grid_in_tables_a_file_and_a_picture(
    learned: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--method", "atc", "tome", "--linkage", "average", "complete", "--keep-rate", "0.7", "0.4")
    out = ("--json", str(tmp_path / "grid.json"), "--plot", str(tmp_path / "grid.png"), "--turns", "2")
    assert evaluate(learned, data, *grid, *out, "--detections", str(tmp_path / "found")) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "grid.json").read_text())
    names = [(result["name"], result["keep_rate"]) for result in report["results"]]
    assert names == [("dense", None), ("atc average", 0.7), ("atc complete", 0.7), ("tome", 0.7)] + [
        (name, 0.4) for name in ("atc average", "atc complete")
    ]
    assert [(cell["name"], cell["keep_rate"]) for cell in report["cannot"]] == [("tome", 0.4)]
    assert "cannot: tome at 0.4" in printed and "mask AP" in printed and "AR100" in printed
    dense = report["results"][0]
    assert dense["box_AP"] == pytest.approx(float(log(learned)[-1]["box_AP"]))
    assert len([name for name in dense if name.startswith(("box_", "mask_"))]) == 24
    reduced = report["results"][1:]
    assert dense["counts"] == [64] * 4 and all(result["counts"][-1] < 64 for result in reduced)
    assert all(result["gflops"] < dense["gflops"] and result["turns"] == 2 for result in reduced)
    assert Image.open(tmp_path / "grid.png").width > 1000
    found = json.loads((tmp_path / "found" / "dense.json").read_text())
    assert found and {"image_id", "category_id", "bbox", "score", "segmentation"} <= found[0].keys()
    # Again: all is there, so nothing runs, and the same numbers are told.
    assert evaluate(learned, data, *grid, *out[:2]) == 0
    again = json.loads((tmp_path / "grid.json").read_text())
    assert (again["results"], again["cannot"]) == (report["results"], report["cannot"])
    assert "batches of 1" not in capsys.readouterr().err
    # One cell more is one cell more.
    assert evaluate(learned, data, "--method", "evit", "--keep-rate", "0.7", *out[:2]) == 2
    assert "class token" in capsys.readouterr().err
    assert evaluate(learned, data, "--method", "kmedoids", "--keep-rate", "0.7", *out[:2], "--turns", "0") == 0
    after = json.loads((tmp_path / "grid.json").read_text())["results"]
    assert after[:-1] == report["results"] and after[-1]["name"] == "kmedoids"
    assert evaluate(learned, data, "--batch-size", "2", *out[:2]) == 2
    assert "holds another evaluation (settings batch_size: 1 there, 2 now)" in capsys.readouterr().err


def test_two_processes_find_what_one_finds(learned: Path, data: Path, tmp_path: Path) -> None:
    # Three images in batches of two: one process has a full batch, the other one image.
    asked = ("--images", "3", "--batch-size", "2", "--method", "atc", "--keep-rate", "0.5", "--turns", "0")
    assert evaluate(learned, data, *asked, "--json", str(tmp_path / "one.json")) == 0
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", "0", "-m", "agglo", "detect", "evaluate", str(learned), "--data", str(data)]
    done = subprocess.run(
        [*launch, *COMMON, *asked, "--json", str(tmp_path / "two.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "AGGLO_TRACEBACK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mask AP") == 1  # one of them tells the result
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in ("one", "two"))
    assert [result["name"] for result in one] == [result["name"] for result in two] == ["dense", "atc average"]
    for alone, shared in zip(one, two, strict=True):
        numbers = [name for name in alone if name.startswith(("box_", "mask_"))]
        assert len(numbers) == 24 and {name: alone[name] for name in numbers} == {
            name: shared[name] for name in numbers
        }
    assert one[0]["box_AP"] > 0


def test_two_processes_train_together(data: Path, tmp_path: Path) -> None:
    settings = quick_detection(epochs=1, lr_drops=[], batch_size=1, lr_batch=2)
    recipe = tmp_path / "two.toml"
    recipe.write_text("[settings]\n" + "\n".join(_lines(vars(settings))))
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", "0", "-m", "agglo", "detect", "train", str(recipe)]
    done = subprocess.run(
        [*launch, "--data", str(data), "--output", str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "AGGLO_TRACEBACK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("batch norms see one process's images each") == 1
    [row] = log(tmp_path / "run")
    assert (
        float(row["train_loss"]) > 0 and json.loads((tmp_path / "run" / "settings.json").read_text())["processes"] == 2
    )


def test_boxes_masks_and_groups_are_shown(learned: Path, data: Path, tmp_path: Path) -> None:
    pictures = sorted((data / "train2017").glob("*.png"))[:2]
    command = ["detect", "show", *map(str, pictures), "--model", str(learned), "--device", "cpu"]
    output = tmp_path / "shown.png"
    assert main([*command, "--method", "atc", "tome", "--keep-rate", "0.5", "--score", "0.2", "-o", str(output)]) == 0
    sheet = Image.open(output)
    # Three columns of pictures drawn large, in two rows each.
    assert sheet.width > 3 * 400 and sheet.height > 4 * 400
    assert len(sheet.convert("RGB").getcolors(1 << 24) or []) > 1000


def test_weights_by_name_folder_and_file(learned: Path, tmp_path: Path) -> None:
    by_folder = open_detector(str(learned))
    by_file = open_detector(str(learned / "best" / "model.safetensors"))
    assert by_folder.spec == by_file.spec and by_folder.spec.classes == ("red square", "blue disc")
    assert by_folder.spec.image_size == 64 and by_folder.learned == {}
    torch.testing.assert_close(dict(by_folder.model.state_dict()), dict(by_file.model.state_dict()), rtol=0, atol=0)
    # Without the words about it, what a file says is its size and its classes.
    from agglo.detection import vit_adapter

    plain = vit_adapter("tiny", n_classes=5)
    save_weights(tmp_path / "plain.safetensors", plain.state_dict(), {})
    opened = open_detector(str(tmp_path / "plain.safetensors"))
    assert (opened.spec.model, opened.spec.n_classes) == ("tiny", 5) and not opened.model.training
    assert open_detector("tiny", tmp_path / "plain.safetensors").spec.n_classes == 5


def test_a_learned_method_comes_with_its_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = quick_detection(epochs=1, lr_drops=[], method="svit", keep_rate=0.5)
    train_detector(settings, data, tmp_path / "svit")
    assert evaluate(tmp_path / "svit", data, "--method", "svit", "--keep-rate", "0.5", "--turns", "0") == 0
    assert "svit" in capsys.readouterr().out
    assert evaluate(tmp_path / "svit", data, "--method", "dynamicvit", "--keep-rate", "0.5") == 2
    assert "holds weights of another method" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train", "name a recipe: dense, finetune, miniature, small_data, or a .toml file"),
        ("train dnese", "recipe='dnese' is none of dense, finetune"),
        ("train dense", "no starting weights: give one of checkpoint=F and from_scratch=true"),
        ("train miniature", "--data is missing"),
        ("train miniature --set lr_dorps=[3]", "'lr_dorps' is no setting; close to it: lr_drops"),
        ("train miniature --method atc --keep-rate 50", r"did you mean 0.5"),
        ("evaluate tinny --data {data}", "model='tinny' is not known and there is no such file; accepted: 'tiny', "),
        ("evaluate {data} --data {data}", "is a folder without best/model.safetensors"),
        ("evaluate miniature --data {data}/none", "is neither a folder nor a JSON file"),
        ("evaluate miniature --data {data} --method tome", "--method says nothing without one of --keep-rate"),
        ("evaluate miniature --data {data} --keep-rate 0.5 --dtype float8", "dtype='float8' is not known"),
        ("evaluate {run} --checkpoint x.pth --data {data}", "has its own weights"),
        ("evaluate miniature --data {data} --plot x.txt", "x.txt"),
        ("show none.jpg --model miniature -o {data}/x.png", "image='none.jpg' is not a file"),
        ("show none.jpg --model miniature -o x.txt", "output='x.txt' is no image file"),
        ("show {image} --model miniature --score 2 -o {data}/x.png", "score=2 must lie in 0 to 1"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    command: str, message: str, learned: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = next((data / "train2017").glob("*.png"))
    words = command.format(data=data, run=learned, image=image).split()
    assert main(["detect", *words]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told


def test_other_classes_are_told(learned: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = data / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["categories"][1]["name"] = "green disc"
    (tmp_path / "instances_train2017.json").write_text(json.dumps(content))
    (tmp_path / "train2017").symlink_to(data / "train2017")
    assert evaluate(learned, tmp_path) == 2
    assert "'blue disc' is 'green disc' there" in capsys.readouterr().err
    content["categories"].append({"id": 99, "name": "third"})
    (tmp_path / "instances_train2017.json").write_text(json.dumps(content))
    assert evaluate(learned, tmp_path) == 2
    assert "tells 2 classes apart" in capsys.readouterr().err


def test_the_help_shows_how(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["detect"], ["detect", "train"], ["detect", "evaluate"], ["detect", "show"]):
        with pytest.raises(SystemExit) as done:
            main([*words, "--help"])
        assert done.value.code == 0
        printed = capsys.readouterr().out
        assert "agglo detect" in printed and max(map(len, printed.splitlines())) <= 125
    assert main(["detect", "train", "finetune", "--show", "--checkpoint", "x.pth", "--model", "small"]) == 0
    assert "epochs = 4" in capsys.readouterr().out
    assert main(["detect", "train", "--list"]) == 0
    assert "miniature" in capsys.readouterr().out


def test_the_small_model_is_small() -> None:
    from agglo.detection.specs import DetectorSpec

    values = {name: value for name, value in SMALL_MODEL.items() if name != "model"}
    detector = DetectorSpec(SMALL_MODEL["model"], 2, **values).build()
    assert sum(parameter.numel() for parameter in detector.parameters()) < 400_000


def test_a_file_without_a_detector_is_told(tmp_path: Path) -> None:
    save_weights(tmp_path / "vit.safetensors", {"pos_embed": torch.zeros(1, 197, 192)}, {})
    for model, checkpoint in (("tiny", tmp_path / "vit.safetensors"), (str(tmp_path / "vit.safetensors"), None)):
        with pytest.raises(ValueError, match=r"vit.safetensors' holds no detector"):
            open_detector(model, checkpoint)
