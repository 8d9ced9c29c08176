"""Pictures of clusters: which patches end up in one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.models import ModelSpec
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


SHEETS = (
    Sheet("imagenet", "IMViz", "deit_small_patch16_224", SMALL, "imagenet", ("00021007", "00022469", "00047649")),
    Sheet("nabirds", "NABViz", "deit_small_patch16_224", SMALL, "nabirds", ("b2f5c", "7f475", "3b4ac")),
    Sheet("coco", "COCOViz", "deit_small_patch16_224", SMALL, "coco", ("000000058111", "000000111619", "000000569893")),
    Sheet("nuswide", "NUSViz", "deit_small_patch16_224", SMALL, "nuswide", ("85530", "125808", "165144")),
    Sheet("methods", "iccvViz", "deit_base_patch16_224", BASE, "nabirds", ("b2f5c", "7f475"), _OTHERS),
)
MINIATURES = (
    Sheet("linkages", "IMViz, NABViz, COCOViz, NUSViz", embedded.NAME, Size(64, 12), FASHION, ("0", "7", "11")),
    Sheet("methods", "iccvViz", embedded.NAME, Size(64, 12), FASHION, ("19", "23"), _OTHERS),
)


class Clusters(Item):
    name = "clusters"
    shows = "figures IMViz, NABViz, COCOViz, NUSViz, iccvViz"
    about = (
        "Groups after the last stage at a keep rate of 25 %: three images of each data set by three linkages, and "
        "DPC-KNN, K-Medoids and ATC side by side on two of NABirds; DPC-KNN with equal weights, since its own are "
        "learned"
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
            if settings.miniature:
                spec, files = embedded_spec(), _written(sheet, settings.run_folder(self.name))
            else:
                spec = ModelSpec(sheet.model, settings.weights[on_data(sheet.model, sheet.data)])
                files = [_found(settings.data[sheet.data], part) for part in sheet.images]
            variants = [entry.variant(_RATE) for entry in sheet.entries]
            path = folder / f"{sheet.name}.png"
            visualize(spec, files, variants, scale=8 if settings.miniature else 2).save(path)
            return {"picture": path.name, "images": [file.name for file in files]}

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


def _written(sheet: Sheet, folder: Path) -> list[Path]:
    """Images that come with agglo, as files."""
    from PIL import Image

    from agglo.experiments.fashion_mnist import CLASSES, find_idx, read_idx

    images = read_idx(find_idx(embedded.IMAGES, "t10k-images-idx3-ubyte"), 3)
    labels = read_idx(find_idx(embedded.IMAGES, "t10k-labels-idx1-ubyte"), 1)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in map(int, sheet.images):
        path = folder / f"{number} {CLASSES[int(labels[number])].replace('/', ' ')}.png"
        Image.fromarray(images[number]).save(path)
        files.append(path)
    return files


ITEMS = (Clusters(),)
