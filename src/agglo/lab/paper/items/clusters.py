"""Figures of clusters: which patches end up in one token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import CLASSES, read_split
from agglo.lab.evaluation.configs import Configs
from agglo.lab.paper.classifiers import ATC, DEITS, EMBEDDED, EQUAL, FASHION, Entry, data_need, weights_name
from agglo.lab.paper.study import CannotRunError, Need, Result, RunCell, Section, Settings, Study, StudyCell
from agglo.models.opening import ModelSpec, build

_RATE = 0.25
_OTHERS = (Entry("dpc_knn", "dpc_knn", EQUAL.options), Entry("kmedoids", "kmedoids"), ATC[1])


class Sheet(NamedTuple):
    """One figure: several images of a data set, each under several reductions.

    `images` are parts of the paper's file names; of Fashion-MNIST they are numbers in the test set.
    """

    name: str
    figure: str
    model: str
    data: str
    images: tuple[str, ...]
    entries: tuple[Entry, ...] = ATC
    every_stage: bool = False


SHEETS = (
    Sheet("imagenet", "IMViz", DEITS[1], "imagenet", ("00021007", "00022469", "00047649")),
    Sheet("nabirds", "NABViz", DEITS[1], "nabirds", ("b2f5c", "7f475", "3b4ac")),
    Sheet("coco", "COCOViz", DEITS[1], "coco", ("000000058111", "000000111619", "000000569893")),
    Sheet("nuswide", "NUSViz", DEITS[1], "nuswide", ("85530", "125808", "165144")),
    Sheet("methods", "iccvViz", DEITS[2], "nabirds", ("b2f5c", "7f475"), _OTHERS, True),
)
MINIATURES = (
    Sheet("linkages", "IMViz, NABViz, COCOViz, NUSViz", embedded.NAME, FASHION, ("0", "7", "11")),
    Sheet("methods", "iccvViz", embedded.NAME, FASHION, ("19", "23"), _OTHERS, True),
)


def _axes(sheets: Sequence[Sheet], settings: Settings) -> Iterator[StudyCell]:
    for sheet in sheets:
        weights = weights_name(sheet.model, sheet.data)
        needs = data_need(sheet.data), Need("weights", weights, "trained on the data set of the images")
        about = {"sheet": sheet.name, "figure": sheet.figure, "model": sheet.model, "data": sheet.data}
        yield StudyCell(about, () if sheet.data == FASHION else needs)


def _run(sheets: Sequence[Sheet], settings: Settings) -> RunCell:
    folder = settings.folder("clusters")

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        from agglo.lab.tasks.classification.evaluation.figures import visualize

        sheet = next(sheet for sheet in sheets if sheet.name == about["sheet"])
        folder.mkdir(parents=True, exist_ok=True)
        configs = {entry.config(_RATE): entry.name for entry in sheet.entries}
        if sheet.data == FASHION:
            drawn, names = _draw_embedded(sheet, configs)
        else:
            files = [_find(settings.data[sheet.data], part) for part in sheet.images]
            spec = ModelSpec(sheet.model, settings.weights[weights_name(sheet.model, sheet.data)])
            drawn = visualize(spec, files, configs, every_stage=sheet.every_stage)
            names = [file.name for file in files]
        drawn.save(folder / f"{sheet.name}.png")
        return {"picture": f"{sheet.name}.png", "images": names}

    return run


def _find(root: Path, part: str) -> Path:
    """Return the image whose name holds what the paper's file name holds."""
    files = sorted(path for path in root.rglob(f"*{part}*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise CannotRunError(f"no image under {str(root)!r} has {part!r} in its name, as the paper's has")
    return files[0]


def _draw_embedded(sheet: Sheet, configs: Configs) -> tuple[Any, list[str]]:
    """Draw images that come with agglo, which the model takes as they are, and return their names too."""
    from agglo.lab.tasks.classification.data.transforms import inputs_for
    from agglo.lab.tasks.classification.evaluation.figures import class_names, draw_configs

    images, labels = read_split(embedded.IMAGES, "val")
    numbers = [int(number) for number in sheet.images]
    model = build(EMBEDDED.spec(Settings()))
    wanted = inputs_for(model, FASHION)
    pixels = torch.from_numpy(images[numbers])[:, None]
    names = [f"{number}, {CLASSES[int(labels[number])]}" for number in numbers]
    inputs = wanted.normalise(pixels)
    how: dict[str, Any] = {"classes": class_names(model), "scale": 8, "every_stage": sheet.every_stage}
    return draw_configs(model, inputs, pixels.expand(-1, 3, -1, -1), configs, names=names, **how), names


def _table(results: Sequence[Result], sheets: Sequence[Sheet]) -> list[Section]:
    return [
        Section(f"{r['sheet']}: {r['figure']}", text=f"{r['model']}, {r['data']}: {', '.join(r['images'])}.")
        for r in results
        if "picture" in r
    ]


ITEMS = (
    Study(
        name="clusters",
        shows="figures IMViz, NABViz, COCOViz, NUSViz, iccvViz",
        about="Groups at a keep rate of 25 %: after the last stage, of three images of each data set by three "
        "linkages; and stage by stage, of two images of NABirds by DPC-KNN (with equal weights, since its own are "
        "learned), K-Medoids and ATC",
        stands_in="The embedded classifier and images of Fashion-MNIST that come with agglo stand in for all.",
        gpu_hours="under 0.1",
        full=SHEETS,
        miniature=MINIATURES,
        axes=_axes,
        run=_run,
        table=_table,
        # They were drawn as they were run.
        draw=lambda results, sheets, settings, folder: [folder / r["picture"] for r in results if "picture" in r],
    ),
)
