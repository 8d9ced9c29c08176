"""Every data set format, written by hand in a temporary folder, and what is said when something is missing."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agglo.lab.data.image_files import BadImageError
from agglo.lab.tasks.classification import data as registry
from agglo.lab.tasks.classification.data import (
    ClassificationData,
    DataSet,
    dataset_names,
    detect,
    open_split,
)

Image = pytest.importorskip("PIL.Image")
WNIDS = ("n01440764", "n01443537", "n02102040")  # classes 0, 1 and 217 of ImageNet-1K


def save_image(path: Path, value: int = 100, size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def targets(data: ClassificationData) -> list[Any]:
    return [data[index][1] for index in range(len(data))]


def require_refusal(message: str, dataset: str, root: Path, split: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_split(dataset, root, split)


def brightness(data: ClassificationData) -> list[int]:
    return [data[index][0].convert("L").getpixel((0, 0)) for index in range(len(data))]


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """Four images of classes 9, 10 and 295: sorted as numbers, not as text."""
    rows = {"aa": ("0295/a.jpg", "295", "1"), "bb": ("0295/b.jpg", "295", "0")}
    rows |= {"cc": ("0009/c.jpg", "9", "0"), "dd": ("0010/d.jpg", "10", "1")}
    for number, (path, _, _) in enumerate(rows.values()):
        save_image(tmp_path / "images" / path, 50 * number)
    for place, file in enumerate(("images.txt", "image_class_labels.txt", "train_test_split.txt")):
        (tmp_path / file).write_text("".join(f"{key} {row[place]}\n" for key, row in rows.items()))
    (tmp_path / "classes.txt").write_text("0 Birds\n9 Loon\n10 Small Grebe\n295 Wood Duck (Female)\n")
    (tmp_path / "hierarchy.txt").write_text("9 0\n10 0\n295 0\n")
    return tmp_path


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Three images with objects and one without; categories neither sorted nor contiguous."""
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 3, "name": "car"}]
    objects = {"train": [(7, 1, 0), (7, 90, 1), (7, 1, 0)], "val": [(5, 3, 0), (6, 90, 0)]}
    images = {"train": [7], "val": [5, 6, 8]}
    for split in objects:
        content = {
            "categories": categories,
            "images": [{"id": i, "file_name": f"COCO_{split}2014_{i:012}.jpg"} for i in images[split]],
            "annotations": [
                {"id": n, "image_id": i, "category_id": c, "iscrowd": crowd, "area": 10.0}
                for n, (i, c, crowd) in enumerate(objects[split])
            ],
        }
        for image in content["images"]:
            save_image(tmp_path / f"{split}2014" / str(image["file_name"]))
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"instances_{split}2014.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def nuswide(tmp_path: Path) -> Path:
    rows = [("images/1.jpg", ["sky", "clouds"], "train"), ("images/2.jpg", ["animal"], "val")]
    rows += [("images/sub dir/3.jpg", ["sky"], "val"), ("images/4.jpg", [], "val")]
    with (tmp_path / "nus_wid_data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "label", "split_name"])
        writer.writerows(rows)
    for path, _, _ in rows:
        save_image(tmp_path / path)
    return tmp_path


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes()
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for prefix, count, ending in (("train", 5, ".gz"), ("t10k", 3, "")):
        pixels = generator.integers(0, 256, (count, 28, 28))
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{ending}", pixels)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{ending}", np.arange(count) + 2)
    return tmp_path


def test_class_folders(tmp_path: Path) -> None:
    for path in ("val/b/2.png", "val/b/1.jpg", "val/a/deep/3.JPEG", "train/a/4.webp", "train/b/5.png"):
        save_image(tmp_path / path)
    (tmp_path / "val" / "b" / ".1.jpg").write_text("the system's")
    (tmp_path / "val" / "b" / "notes.txt").write_text("no image by its ending")
    val, train = open_split("folder", tmp_path, "val"), open_split("folder", tmp_path, "train")
    assert val.classes == train.classes == ["a", "b"]
    assert targets(val) == [0, 1, 1] and targets(train) == [0, 1]
    assert not val.multi_label and val[0][0].size == (12, 10) and val[0][0].mode == "RGB"
    assert detect(tmp_path) == "folder"
    # The split itself may be given, and is what is evaluated.
    assert targets(open_split("folder", tmp_path / "val", "val")) == [0, 1, 1]
    require_refusal("has no folder 'train'", "folder", tmp_path / "val", "train")
    (tmp_path / "val" / "empty").mkdir()
    with pytest.raises(OSError, match="empty"):
        open_split("folder", tmp_path, "val")


def test_some_of_imagenets_classes_keep_their_numbers(tmp_path: Path) -> None:
    for wnid in WNIDS:
        save_image(tmp_path / "val" / wnid / "x.JPEG")
    data = open_split("imagenet", tmp_path, "val")
    assert targets(data) == [0, 1, 217] and len(data.classes) == 1000
    assert detect(tmp_path) == detect(tmp_path / "val") == "imagenet"
    assert targets(open_split("folder", tmp_path, "val")) == [0, 1, 2]
    save_image(tmp_path / "val" / "n99999999" / "x.JPEG")
    require_refusal("n99999999; --dataset folder", "imagenet", tmp_path, "val")
    assert detect(tmp_path) == "folder"


def test_nabirds(birds: Path) -> None:
    train, test = open_split("nabirds", birds, "train"), open_split("nabirds", birds, "val")
    assert train.classes == test.classes == ["Loon", "Small Grebe", "Wood Duck (Female)"]
    assert targets(train) == [2, 1] and targets(test) == [2, 0]
    assert brightness(train) == [0, 150] and brightness(test) == [50, 100]
    assert detect(birds) == "nabirds"


def test_coco(coco: Path) -> None:
    train = open_split("coco", coco, "train")
    with pytest.warns(UserWarning, match="1 of 3 images show no object"):
        val = open_split("coco", coco, "val")
    assert train.multi_label and train.classes == val.classes == ["toothbrush", "person", "car"]
    assert torch.equal(train[0][1], torch.tensor([1.0, 1.0, 0.0]))
    assert torch.stack(targets(val)).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert detect(coco) == "coco"


def test_nuswide(nuswide: Path) -> None:
    train, val = open_split("nuswide", nuswide, "train"), open_split("nuswide", nuswide, "val")
    assert train.classes == val.classes == ["animal", "clouds", "sky"]
    assert torch.stack(targets(train)).tolist() == [[0, 1, 1]]
    assert torch.stack(targets(val)).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert detect(nuswide) == "nuswide"


def test_fashion_mnist(clothes: Path, tmp_path: Path) -> None:
    train, test = open_split("fashion-mnist", clothes, "train"), open_split("fashion-mnist", clothes, "val")
    assert targets(train) == [2, 3, 4, 5, 6] and targets(test) == [2, 3, 4]
    assert train[0][0].mode == "L" and train[0][0].size == (28, 28) and len(train.classes) == 10
    expected = np.random.default_rng(0).integers(0, 256, (5, 28, 28))
    assert np.array_equal(np.asarray(train[4][0]), expected[4])
    assert detect(clothes) == "fashion-mnist"
    for path in list(clothes.glob("t10k*")):
        (clothes / "FashionMNIST" / "raw").mkdir(parents=True, exist_ok=True)
        path.rename(clothes / "FashionMNIST" / "raw" / path.name)
    assert targets(open_split("fashion-mnist", clothes, "val")) == [2, 3, 4]


def test_an_unreadable_image_is_named_in_one_line(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.png", size=(60, 60))
    (tmp_path / "a" / "1.png").write_bytes((tmp_path / "a" / "1.png").read_bytes()[:60])
    (tmp_path / "a" / "2.jpg").write_text("no image")
    data = open_split("folder", tmp_path, "val", transform=lambda image: torch.zeros(1))
    with pytest.raises(BadImageError, match=r"a/1.png' cannot be read"):
        data[0]
    with pytest.raises(BadImageError, match=r"^image '.*a/2.jpg' cannot be read.*") as caught:
        list(torch.utils.data.DataLoader(torch.utils.data.Subset(data, [1]), num_workers=1))
    assert "\n" not in str(caught.value)


def test_two_data_sets_in_one_folder_must_be_told_apart(nuswide: Path, birds: Path) -> None:
    assert nuswide == birds
    with pytest.raises(ValueError, match="nabirds, nuswide"):
        detect(nuswide)


def test_the_fingerprint_follows_names_and_targets_but_not_the_place(tmp_path: Path) -> None:
    for root in ("one", "two"):
        for path in ("a/1.png", "b/2.png"):
            save_image(tmp_path / root / path)
    same = [open_split("folder", tmp_path / root, "val").fingerprint() for root in ("one", "two")]
    assert same[0] == same[1]
    (tmp_path / "two" / "a" / "1.png").rename(tmp_path / "two" / "a" / "3.png")
    assert open_split("folder", tmp_path / "two", "val").fingerprint() != same[0]


def test_what_is_missing_or_not_understood_is_named(birds: Path, coco: Path, nuswide: Path, clothes: Path) -> None:
    root = birds
    assert root == coco == nuswide == clothes
    for dataset, split, image in (
        ("nabirds", "val", "images/0009/c.jpg"),
        ("coco", "val", "val2014/COCO_val2014_000000000006.jpg"),
        ("nuswide", "val", "images/2.jpg"),
    ):
        (root / image).unlink()
        require_refusal(image, dataset, root, split)
    for dataset, file, content in (
        ("nabirds", "image_class_labels.txt", "aa 295\n"),
        ("nabirds", "classes.txt", "9\n"),
        ("coco", "annotations/instances_val2014.json", "{}"),
        ("nuswide", "nus_wid_data.csv", "filepath,label,split_name\nimages/1.jpg,sky,val\n"),
        ("nuswide", "nus_wid_data.csv", "path,labels\n"),
        ("fashion-mnist", "t10k-labels-idx1-ubyte", "none"),
    ):
        whole = (root / file).read_bytes()
        (root / file).write_text(content)
        require_refusal(Path(file).name, dataset, root, "val")
        (root / file).unlink()
        require_refusal(Path(file).name, dataset, root, "val")
        (root / file).write_bytes(whole)
    packed = root / "train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:-9])
    require_refusal(packed.name, "fashion-mnist", root, "train")


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    require_refusal("dataset='cifar'", "cifar", tmp_path, "val")
    require_refusal("split='dev'", "folder", tmp_path, "dev")
    require_refusal("data='/nowhere'", "folder", Path("/nowhere"), "val")
    require_refusal("no class folders", "folder", tmp_path, "val")
    with pytest.raises(ValueError, match="no data set"):
        detect(tmp_path)
    (tmp_path / "nus_wid_data.csv").write_text("filepath,label,split_name\n")
    require_refusal("no images", "nuswide", tmp_path, "train")


def test_a_name_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_nothing(root: Path, split: str) -> ClassificationData:
        raise NotImplementedError

    dataset_names()
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    mine = DataSet("mine", "", read_nothing)
    assert registry.register(mine) is registry.register(mine)
    with pytest.raises(ValueError, match=r"'coco' .*data.formats"):
        registry.register(DataSet("coco", "", read_nothing))
