"""Figures of clusters: which patches end up in one token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import CLASSES, find_idx, read_idx
from agglo.lab.evaluation.configs import Configs
from agglo.lab.paper.classifiers import ATC, FASHION, Entry, data_need, embedded_spec, on_data
from agglo.lab.paper.estimates import BASE, SMALL, Size
from agglo.lab.paper.study import CannotRunError, Cell, Need, Result, RunCell, Section, Settings, Study
from agglo.models.opening import ModelSpec, build
from agglo.schedule import Stages

_RATE = 0.25
_OTHERS = (Entry("dpc_knn", "dpc_knn", options={"weights": "equal"}), Entry("kmedoids", "kmedoids"), ATC[1])


@dataclass(frozen=True)
class Sheet:
    """One figure: several images of a data set, each under several reductions.

    Attributes:
        images: What the file names of the paper's images hold; of Fashion-MNIST their numbers in the test set.
    """

    name: str
    figure: str
    model: str
    size: Size
    data: str
    images: tuple[str, ...]
    entries: tuple[Entry, ...] = ATC
    every_stage: bool = False


SHEETS = (
    Sheet("imagenet", "IMViz", "deit_small_patch16_224", SMALL, "imagenet", ("00021007", "00022469", "00047649")),
    Sheet("nabirds", "NABViz", "deit_small_patch16_224", SMALL, "nabirds", ("b2f5c", "7f475", "3b4ac")),
    Sheet("coco", "COCOViz", "deit_small_patch16_224", SMALL, "coco", ("000000058111", "000000111619", "000000569893")),
    Sheet("nuswide", "NUSViz", "deit_small_patch16_224", SMALL, "nuswide", ("85530", "125808", "165144")),
    Sheet("methods", "iccvViz", "deit_base_patch16_224", BASE, "nabirds", ("b2f5c", "7f475"), _OTHERS, True),
)
MINIATURES = (
    Sheet("linkages", "IMViz, NABViz, COCOViz, NUSViz", embedded.NAME, Size(64, 12), FASHION, ("0", "7", "11")),
    Sheet("methods", "iccvViz", embedded.NAME, Size(64, 12), FASHION, ("19", "23"), _OTHERS, True),
)


def _axes(sheets: Sequence[Sheet], settings: Settings) -> Iterator[Cell]:
    for sheet in sheets:
        needs: tuple[Need, ...] = ()
        if sheet.data != FASHION:
            about = "trained on the data set of the images"
            needs = data_need(sheet.data), Need("weights", on_data(sheet.model, sheet.data), about)
        cost = len(sheet.images) * len(sheet.entries) * sheet.size.multiply_adds(Stages(_RATE))
        where = {"sheet": sheet.name, "figure": sheet.figure, "model": sheet.model, "data": sheet.data}
        yield Cell(where, needs, cost)


def _run(sheets: Sequence[Sheet], settings: Settings) -> RunCell:
    folder = settings.folder("clusters")

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        from agglo.lab.tasks.classification.evaluation.figures import visualize

        sheet = next(sheet for sheet in sheets if sheet.name == about["sheet"])
        folder.mkdir(parents=True, exist_ok=True)
        configs = {entry.config(_RATE): entry.name for entry in sheet.entries}
        if sheet.data == FASHION:
            picture, names = _of_embedded(sheet, configs)
        else:
            spec = ModelSpec(sheet.model, settings.weights[on_data(sheet.model, sheet.data)])
            files = [_found(settings.data[sheet.data], part) for part in sheet.images]
            picture = visualize(spec, files, configs, every_stage=sheet.every_stage)
            names = [file.name for file in files]
        path = folder / f"{sheet.name}.png"
        picture.save(path)
        return {"picture": path.name, "images": names}

    return run


def _found(root: Path, part: str) -> Path:
    """Return the image whose name ends with what the paper's file names hold."""
    files = sorted(path for path in root.rglob(f"*{part}*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise CannotRunError(f"no image under {str(root)!r} has {part!r} in its name, as the paper's has")
    return files[0]


def _of_embedded(sheet: Sheet, configs: Configs) -> tuple[Any, list[str]]:
    """Draw images that come with agglo, which the model takes as they are, and return their names too."""
    from agglo.lab.tasks.classification.data.transforms import Normalise, inputs_for
    from agglo.lab.tasks.classification.evaluation.figures import class_names, draw_configs

    images = read_idx(find_idx(embedded.IMAGES, "t10k-images-idx3-ubyte"), 3)
    labels = read_idx(find_idx(embedded.IMAGES, "t10k-labels-idx1-ubyte"), 1)
    numbers = [int(number) for number in sheet.images]
    model = build(embedded_spec())
    wanted = inputs_for(model, FASHION)
    pixels = torch.from_numpy(images[numbers])[:, None]
    names = [f"{number}, {CLASSES[int(labels[number])]}" for number in numbers]
    inputs = Normalise(wanted.mean, wanted.std)(pixels)
    how: dict[str, Any] = {"classes": class_names(model), "scale": 8, "every_stage": sheet.every_stage}
    return draw_configs(model, inputs, pixels.expand(-1, 3, -1, -1), configs, names=names, **how), names


def _table(results: Sequence[Result], sheets: Sequence[Sheet]) -> list[Section]:
    return [
        Section(
            f"{result['sheet']}: {result['figure']}",
            text=f"{result['model']}, {result['data']}: {', '.join(result['images'])}.",
        )
        for result in results
        if "picture" in result
    ]


ITEMS = (
    Study(
        name="clusters",
        shows="figures IMViz, NABViz, COCOViz, NUSViz, iccvViz",
        about="Groups at a keep rate of 25 %: after the last stage, of three images of each data set by three "
        "linkages; and stage by stage, of two images of NABirds by DPC-KNN (with equal weights, since its own are "
        "learned), K-Medoids and ATC",
        stands_in="The embedded classifier and images of Fashion-MNIST that come with agglo stand in for all.",
        full=SHEETS,
        miniature=MINIATURES,
        axes=_axes,
        run=_run,
        table=_table,
        # They were drawn as they were run.
        draw=lambda results, sheets, settings, folder: [folder / r["picture"] for r in results if "picture" in r],
    ),
)
