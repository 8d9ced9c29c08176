"""COCO files: what is read from good ones, and what is said about bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agglo.lab.data.image_files import BadImageError
from agglo.lab.tasks.detection.data.base import encode
from agglo.lab.tasks.detection.data.coco import CocoImages, open_coco
from tests.support.data import data_path

WIDTH, HEIGHT = 40, 30
SQUARE = [4, 5, 14, 5, 14, 15, 4, 15]


def runs_of(mask: np.ndarray) -> list[int]:
    """The definition: lengths of runs down the columns, which alternate and begin outside."""
    flat = mask.T.flatten().astype(int)
    ends = np.flatnonzero(np.diff(flat, prepend=0)).tolist()
    return np.diff([0, *ends, len(flat)]).tolist()


def content(**changes: Any) -> dict[str, Any]:
    """Two images, one of them empty; a polygon, an RLE, a packed RLE and a crowd. Ids have gaps and no order."""
    box_mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    box_mask[20:28, 30:35] = 1
    rle = {"size": [HEIGHT, WIDTH], "counts": runs_of(box_mask)}
    plain: dict[str, Any] = {"image_id": 5, "iscrowd": 0}
    return {
        "images": [
            {"id": 5, "file_name": "a.png", "width": WIDTH, "height": HEIGHT},
            {"id": 2, "file_name": "sub/b.png", "width": WIDTH, "height": HEIGHT},
        ],
        "categories": [{"id": 9, "name": "dog"}, {"id": 4, "name": "cat"}],
        "annotations": [
            {"id": 1, "category_id": 9, "bbox": [4, 5, 10, 10], "area": 100, "segmentation": [SQUARE], **plain},
            {"id": 3, "category_id": 4, "bbox": [30, 20, 5, 8], "segmentation": rle, **plain},
            {"id": 8, "category_id": 4, "segmentation": encode(box_mask[None])[0], **plain},
            {**plain, "id": 4, "category_id": 9, "bbox": [30, 20, 5, 8], "segmentation": rle, "area": 40, "iscrowd": 1},
        ],
        **changes,
    }


def write(root: Path, file: dict[str, Any], name: str = "instances_train2017.json", folder: str = "images") -> Path:
    (root / folder / "sub").mkdir(parents=True, exist_ok=True)
    for path in ("a.png", "sub/b.png"):
        Image.new("L", (WIDTH, HEIGHT), 77).save(root / folder / path)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(json.dumps(file))
    return root


def test_polygons_and_run_lengths_are_read(tmp_path: Path) -> None:
    data = open_coco(write(tmp_path, content()))
    assert len(data) == 2 and data.image_ids == [5, 2]
    assert data.classes == ["cat", "dog"] and data.category_ids == [4, 9]
    image, target = data[0]
    assert image.mode == "RGB" and image.size == (WIDTH, HEIGHT)
    assert target["labels"].tolist() == [1, 0, 0]  # without the crowd
    assert target["boxes"].tolist() == [[4, 5, 14, 15], [30, 20, 35, 28], [30, 20, 35, 28]]
    assert target["boxes"].canvas_size == (HEIGHT, WIDTH)
    assert target["masks"].shape == (3, HEIGHT, WIDTH)
    assert target["masks"][0].nonzero().min(0).values.tolist() == [5, 4] and target["masks"][0].sum() == 100
    for mask in target["masks"][1:]:
        assert mask[20:28, 30:35].all() and mask.sum() == 40
    assert (target["image_id"], target["original_size"]) == (5, (HEIGHT, WIDTH))
    _, empty = data[1]
    assert empty["boxes"].shape == (0, 4) and empty["masks"].shape == (0, HEIGHT, WIDTH) and empty["image_id"] == 2
    truth = data.ground_truth
    assert [entry["id"] for entry in truth["annotations"]] == [1, 3, 8, 4]
    assert truth["annotations"][2]["bbox"] == [30, 20, 5, 8] and truth["annotations"][2]["area"] == 40
    part = data.part([1])
    assert part.image_ids == [2] and part[-1][1]["image_id"] == 2
    assert not part.ground_truth["annotations"] and len(part.ground_truth["images"]) == 1
    assert open_coco(tmp_path, with_objects=True).image_ids == [5]
    plain = data.prepared(lambda image, target: (image.size, target), annotated=False)
    assert plain[0] == ((WIDTH, HEIGHT), {"image_id": 5, "original_size": (HEIGHT, WIDTH)})


def test_every_layout_is_found(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write(tmp_path / "2017", content(), f"annotations/instances_{split}2017.json", f"{split}2017")
        assert open_coco(tmp_path / "2017", split).name == f"instances_{split}2017.json"
    flat = write(tmp_path / "flat", content(), "instances.json")
    assert open_coco(flat, "val").image_ids == open_coco(flat, "train").image_ids
    elsewhere = write(tmp_path / "other", content(), "mine.json", "elsewhere")
    assert len(CocoImages(elsewhere / "mine.json", elsewhere / "elsewhere")) == 2
    for path, split, named in (
        (elsewhere / "mine.json", "train", "other/images"),
        (write(tmp_path / "train only", content()), "val", "instances_val2017"),
        (tmp_path / "nowhere", "train", "neither a folder nor"),
        (flat, "test", "split='test'"),
    ):
        with pytest.raises(ValueError, match=named):
            open_coco(path, split)


def changed(number: int, **changes: Any) -> dict[str, Any]:
    file = content()
    file["annotations"][number] |= changes
    return file


RLE = {"size": [HEIGHT, WIDTH]}


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    for file, message in (
        (changed(0, bbox=[4, 5, float("nan"), 3]), "annotation 1 of image 5 .*the box"),
        (changed(0, bbox=[4, 5, 6]), "the box"),
        (changed(0, segmentation=[]), "segmentation"),
        (changed(0, segmentation=[[1, 2, 3, 4]]), "segmentation"),
        (changed(1, segmentation={"size": [3, 4], "counts": [12]}), "annotation 3 .*segmentation"),
        (changed(0, category_id=77), "category 77"),
        (changed(0, image_id=78), "image 78"),
        (content(images=[{"id": 5, "file_name": "none.png", "width": 5, "height": 5}]), "none.png"),
        (content(annotations=[3]), "no COCO instances file"),
        ({"images": []}, "categories"),
        (content(images=[], annotations=[]), "no image"),
    ):
        with pytest.raises(ValueError, match=rf"(?s)instances_train2017.json.*{message}"):
            open_coco(write(tmp_path, file))


def test_an_image_that_cannot_be_used_is_named_when_it_is_read(tmp_path: Path) -> None:
    root = write(tmp_path, changed(1, segmentation={**RLE, "counts": [5, 5]}))
    data = open_coco(root)
    with pytest.raises(BadImageError, match=r"image 5 .*bad RLE"):
        data[0]
    (root / "images" / "a.png").write_bytes(b"no image")
    Image.new("L", (WIDTH, HEIGHT + 1)).save(root / "images" / "sub" / "b.png")
    with pytest.raises(BadImageError, match=r"a\.png"):
        data[0]
    with pytest.raises(BadImageError, match=r"image 2, .*40x31 and 40x30"):
        data[1]


def test_objects_below_a_pixel_are_no_targets(tmp_path: Path) -> None:
    """What lies inside the image counts. COCO's train2017 has boxes without area."""
    for box in ([39.5, 5, 10, 10], [4, 5, 0, 10]):
        data = open_coco(write(tmp_path, changed(0, bbox=box)))
        assert data[0][1]["labels"].tolist() == [0, 0] and len(data.ground_truth["annotations"]) == 4


def test_real_coco_files() -> None:
    data = open_coco(data_path("coco128"))
    assert len(data) == 128 and len(data.classes) == 80
    assert sum(not entry["iscrowd"] for entry in data.ground_truth["annotations"]) == 887
    off = []
    for index in range(0, 128, 16):
        image, target = data[index]
        boxes, masks = target["boxes"], target["masks"]
        assert tuple(masks.shape[1:]) == image.size[::-1]
        for box, mask in zip(boxes.tolist(), masks, strict=True):
            rows, columns = mask.nonzero().T
            around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            off.append(np.abs(np.array(around) - box).max())
    # Polygons are drawn on whole pixels, and a thin tip may lie between them.
    assert len(off) > 30 and np.mean(np.array(off) < 1.5) > 0.9 and max(off) < 5
