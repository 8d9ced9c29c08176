"""agglo detect: a detector learns a few images by heart, is evaluated dense and reduced, and shows what it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from agglo.lab.cli import main
from agglo.lab.tasks.detection import vit_adapter
from agglo.lab.tasks.detection.specs import open_detector
from agglo.lab.tasks.detection.training.trainer import train_detector
from agglo.utils.files import save_weights
from tests.support.detection import quick_detection, write_coco
from tests.support.fashion import log
from tests.support.processes import in_two_processes

IMAGES = 4
COMMON = ("--split", "train", "--images", str(IMAGES), "--device", "cpu", "--workers", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("coco") / "data", n_train=IMAGES)


@pytest.fixture(scope="module")
def learned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a detector that knows four images."""
    output = tmp_path_factory.mktemp("learned") / "run"
    how: dict[str, Any] = {"batch_size": 4, "lr_batch": 4, "lr": 2e-3, "warmup_steps": 5, "lr_drops": [], "flip": 0.0}
    settings = quick_detection(images=IMAGES, epochs=24, evaluate_every=8, checkpoint_minutes=60.0, **how)
    recipe = output.with_suffix(".toml")
    recipe.write_text("\n".join(["[settings]", *(f"{name} = {toml(value)}" for name, value in vars(settings).items())]))
    assert main(["detect", "train", str(recipe), "--data", str(data), "--output", str(output)]) == 0
    return output


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    return json.dumps("none" if value is None else value)


def evaluate(model: Path | str, data: Path, *more: str) -> int:
    return main(["detect", "evaluate", str(model), "--data", str(data), *COMMON, *more])


def test_a_few_images_are_learned_by_heart(learned: Path) -> None:
    rows = log(learned)
    losses, found = ([float(row[name]) for row in rows] for name in ("train_loss", "box_AP"))
    assert losses[-1] < 0.7 * losses[0] and found[-1] > found[0] + 5, (losses, found)
    assert float(rows[-1]["mask_AP"]) > 5


def test_a_grid_in_tables_a_file_and_a_plot(
    learned: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--method", "atc", "tome", "--keep-rate", "0.4")
    out = ("--json", str(tmp_path / "grid.json"), "--plot", str(tmp_path / "grid.png"), "--turns", "2")
    assert evaluate(learned, data, *grid, *out, "--detections", str(tmp_path / "found")) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "grid.json").read_text())
    assert [result["name"] for result in report["results"]] == ["dense", "atc average"]
    assert [cell["name"] for cell in report["cannot"]] == ["tome"]
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
    # Again: all is there, so nothing runs, and the same numbers are printed.
    assert evaluate(learned, data, *grid, *out[:2]) == 0
    again = json.loads((tmp_path / "grid.json").read_text())
    assert (again["results"], again["cannot"]) == (report["results"], report["cannot"])
    assert "batches of 1" not in capsys.readouterr().err
    assert evaluate(learned, data, "--batch-size", "2", *out[:2]) == 2
    assert "batch_size: 1 there, 2 now" in capsys.readouterr().err


def test_two_processes_train_together_and_find_what_one_finds(learned: Path, data: Path, tmp_path: Path) -> None:
    # Three validation images in batches of two: one process has a full batch, the other one image.
    content = json.loads((path := data / "annotations" / "instances_val2017.json").read_text())
    kept = [entry for entry in content["annotations"] if entry["image_id"] != content["images"][-1]["id"]]
    path.write_text(json.dumps({**content, "images": content["images"][:3], "annotations": kept}))
    start = {"checkpoint": str(learned / "best" / "model.safetensors"), "from_scratch": False, "lr": 1e-5}
    settings = quick_detection(**start, epochs=1, lr_drops=[], batch_size=1, evaluation_batch_size=2)
    in_two_processes(tmp_path / "rendezvous", train_detector, settings, data, tmp_path / "run")
    [row] = log(tmp_path / "run")
    assert float(row["train_loss"]) > 0
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["processes"] == 2
    asked = ("--split", "val", "--batch-size", "2", "--turns", "0", "--json", str(tmp_path / "one.json"))
    assert evaluate(tmp_path / "run", data, "--method", "atc", "--keep-rate", "0.5", *asked) == 0
    dense = json.loads((tmp_path / "one.json").read_text())["results"][0]
    assert all(dense[name] == pytest.approx(float(row[name])) for name in ("box_AP", "mask_AP", "box_AP50"))
    assert dense["box_AP"] > 0


def test_boxes_masks_and_groups_are_shown(learned: Path, data: Path, tmp_path: Path) -> None:
    images = map(str, sorted((data / "train2017").glob("*.png"))[:2])
    command = ["detect", "show", *images, "--model", str(learned), "--device", "cpu", "-o", str(tmp_path / "shown.png")]
    assert main([*command, "--method", "atc", "--keep-rate", "0.5", "--score", "0.2"]) == 0
    sheet = Image.open(tmp_path / "shown.png")  # two columns of images drawn large, in two rows each
    assert sheet.width > 2 * 400 and sheet.height > 4 * 400
    assert len(sheet.convert("RGB").getcolors(1 << 24) or []) > 1000


def test_weights_by_name_folder_and_file(learned: Path, tmp_path: Path) -> None:
    by_folder = open_detector(str(learned))
    by_file = open_detector(str(learned / "best" / "model.safetensors"))
    assert by_folder.spec == by_file.spec and by_folder.spec.classes == ("red square", "blue disc")
    assert by_folder.spec.image_size == 64 and by_folder.learned == {}
    torch.testing.assert_close(dict(by_folder.model.state_dict()), dict(by_file.model.state_dict()), rtol=0, atol=0)
    # Without metadata, the tensors of a file say its size and its classes.
    plain = vit_adapter("tiny", n_classes=5)
    save_weights(tmp_path / "plain.safetensors", plain.state_dict(), {})
    opened = open_detector(str(tmp_path / "plain.safetensors"))
    assert (opened.spec.model, opened.spec.n_classes) == ("tiny", 5) and not opened.model.training
    assert open_detector("tiny", tmp_path / "plain.safetensors").spec.n_classes == 5
    save_weights(tmp_path / "vit.safetensors", {"pos_embed": torch.zeros(1, 197, 192)}, {})
    with pytest.raises(ValueError, match=r"vit.safetensors' holds no detector"):
        open_detector("tiny", tmp_path / "vit.safetensors")


def test_what_cannot_be_is_told_in_a_line(learned: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = next((data / "train2017").glob("*.png"))
    for command, message in (
        ("train", "small_data"),
        ("train dense", "no starting weights"),
        (f"evaluate tinny --data {data}", "model='tinny'"),
        (f"evaluate {data} --data {data}", "model.safetensors"),
        (f"evaluate {learned} --checkpoint x.pth --data {data}", "own weights"),
        (f"show none.jpg --model miniature -o {data}/x.png", "image='none.jpg'"),
        (f"show {image} --model miniature --score 2 -o {data}/x.png", "score=2"),
    ):
        assert main(["detect", *command.split()]) == 2
        told = capsys.readouterr().err
        assert message in told and "Traceback" not in told


def test_other_classes_are_named(learned: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((data / "annotations" / "instances_train2017.json").read_text())
    (tmp_path / "train2017").symlink_to(data / "train2017")
    content["categories"][1]["name"] = "green disc"
    (tmp_path / "instances_train2017.json").write_text(json.dumps(content))
    assert evaluate(learned, tmp_path) == 2
    assert "'green disc'" in capsys.readouterr().err
