"""Pictures of clusters: which patches end up in one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.variants import Variant
from agglo.reproduce.classifiers import ATC, FASHION, Entry, data_need, embedded_spec, on_data
from agglo.reproduce.estimates import BASE, SMALL, Size
from agglo.reproduce.item import CannotRunError, Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.schedule import Stages

_RATE = 0.25
_OTHERS = (Entry("dpc_knn", "dpc_knn", options={"weights": "equal"}), Entry("kmedoids", "kmedoids"), ATC[1])


@dataclass(frozen=True)
class Sheet:
    """One picture: several images of a data set, each under several reductions.

    images: what the file names of the paper's images hold; in miniature their numbers in the test set.
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


class Clusters(Item):
    name = "clusters"
    shows = "figures IMViz, NABViz, COCOViz, NUSViz, iccvViz"
    about = (
        "Groups at a keep rate of 25 %: after the last stage, of three images of each data set by three linkages; and "
        "stage by stage, of two images of NABirds by DPC-KNN (with equal weights, since its own are learned), "
        "K-Medoids and ATC"
    )
    miniature_about = "The embedded classifier and images of Fashion-MNIST that come with agglo stand in for all."

    def needs(self, miniature: bool) -> Sequence[Need]:
        if miniature:
            return ()
        data = [data_need(name) for name in dict.fromkeys(sheet.data for sheet in SHEETS)]
        names = dict.fromkeys(on_data(sheet.model, sheet.data) for sheet in SHEETS)
        return [*data, *(Need("weights", name, "trained on the data set of the pictures") for name in names)]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        cells = []
        for sheet in MINIATURES if settings.miniature else SHEETS:
            needs = () if settings.miniature else (sheet.data, on_data(sheet.model, sheet.data))
            work = len(sheet.images) * len(sheet.entries) * sheet.size.multiply_adds(Stages(_RATE))
            about = {"sheet": sheet.name, "figure": sheet.figure, "model": sheet.model, "data": sheet.data}
            cells.append(Cell(about, needs, work))
        return cells

    def open(self, settings: Settings) -> RunCell:
        sheets = {sheet.name: sheet for sheet in (MINIATURES if settings.miniature else SHEETS)}
        folder = settings.folder(self.name)

        def run(cell: Cell) -> dict[str, Any]:
            from agglo.classification.evaluation.pictures import visualize

            sheet = sheets[cell.about["sheet"]]
            folder.mkdir(parents=True, exist_ok=True)
            variants = [entry.variant(_RATE) for entry in sheet.entries]
            if settings.miniature:
                picture, names = _of_embedded(sheet, variants)
            else:
                spec = ModelSpec(sheet.model, settings.weights[on_data(sheet.model, sheet.data)])
                files = [_found(settings.data[sheet.data], part) for part in sheet.images]
                picture = visualize(spec, files, variants, every_stage=sheet.every_stage)
                names = [file.name for file in files]
            path = folder / f"{sheet.name}.png"
            picture.save(path)
            return {"picture": path.name, "images": names}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        return [
            Section(
                f"{result['sheet']}: {result['figure']}",
                text=f"{result['model']}, {result['data']}: {', '.join(result['images'])}.",
            )
            for result in results
            if "picture" in result
        ]

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        """They were drawn as they were run."""
        return [folder / result["picture"] for result in results if "picture" in result]


def _found(root: Path, part: str) -> Path:
    """The image whose name ends with what the paper's file names hold."""
    files = sorted(path for path in root.rglob(f"*{part}*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise CannotRunError(f"no image under {str(root)!r} has {part!r} in its name, as the paper's has")
    return files[0]


def _of_embedded(sheet: Sheet, variants: Sequence[Variant]) -> tuple[Any, list[str]]:
    """A sheet of images that come with agglo, which the model takes as they are, and their names."""
    import torch

    from agglo.classification.data.transforms import Normalise, inputs_for
    from agglo.classification.evaluation.pictures import class_names, draw_variants
    from agglo.experiments.fashion_mnist import CLASSES, find_idx, read_idx

    images = read_idx(find_idx(embedded.IMAGES, "t10k-images-idx3-ubyte"), 3)
    labels = read_idx(find_idx(embedded.IMAGES, "t10k-labels-idx1-ubyte"), 1)
    numbers = [int(number) for number in sheet.images]
    model = build(embedded_spec())
    wanted = inputs_for(model, FASHION)
    pixels = torch.from_numpy(images[numbers])[:, None]
    names = [f"{number}, {CLASSES[int(labels[number])]}" for number in numbers]
    inputs = Normalise(wanted.mean, wanted.std)(pixels)
    shown = pixels.expand(-1, 3, -1, -1)
    how: dict[str, Any] = {"classes": class_names(model), "scale": 8, "every_stage": sheet.every_stage}
    return draw_variants(model, inputs, shown, variants, names=names, **how), names


ITEMS = (Clusters(),)
