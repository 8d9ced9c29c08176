"""What items about image synthesis share: ways to reduce, what generates, what is generated, real images beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agglo.embedded import generator as embedded
from agglo.experiments.evaluation.cells import one_of_several
from agglo.experiments.fashion_mnist import read_split
from agglo.reproduce.classifiers import FASHION, LINKAGES
from agglo.reproduce.estimates import Size
from agglo.reproduce.item import Need, Settings
from agglo.synthesis.data.requests import Request, fashion_requests, imagenet_requests
from agglo.synthesis.evaluation.cells import DENSE, OWN, PAPER, Cell, cells_of
from agglo.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator, pictures
from agglo.synthesis.evaluation.grid import Workers

if TYPE_CHECKING:
    from PIL.Image import Image

    from agglo.classification.data import Listing

PIPELINE, IMAGENET, INCEPTION = "stable-diffusion-v1-5", "imagenet", "inception"
APART = 10_000_000  # between the seeds of two sets
# The U-Net of Stable Diffusion 1.5 at 512 x 512, once for the prompt and once without it.
PIPELINE_CALL = 2 * 3.4e11
EMBEDDED_CALL = Size(64, 8, patches=256).multiply_adds()

Ways = dict[tuple[str, float | None], Cell]


@dataclass(frozen=True)
class Scale:
    """What differs between a full run and one in miniature.

    per_class, sets: images of a class in a set of seeds, and sets. reference: real images that they are compared with.
    tome: options of the paper's ToMe, which most likely kept the first token of each cell.
    """

    keep_rates: tuple[float, ...]
    per_class: int
    sets: int
    steps: int
    guidance: float
    batch_size: int
    reference: int
    tome: dict[str, Any] = field(default_factory=dict)


FULL = Scale((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 2, 1, 50, 7.5, 1, 5000, {"use_rand": False})
MINIATURE = Scale((0.9, 0.7, 0.5, 0.4), 15, 3, 20, 1.0, 50, 1000)


def ways_of(cells: Iterable[Cell]) -> Ways:
    """By name and keep rate; the dense model has none.

    >>> list(ways_of(cells_of(["dense", "atc"], [0.5])))
    [('dense', None), ('atc-average', 0.5)]
    """
    found: Ways = {}
    for cell in cells:
        name, _, rate = cell.name.rpartition("_keep")
        found[(name, float(rate)) if name else (cell.name, None)] = cell
    return found


def renamed(name: str, cells: Sequence[Cell]) -> list[Cell]:
    """The same cells under another name, each with its keep rate behind it."""
    return [Cell(f"{name}_keep{cell.options['keep_rate']:g}", cell.options) for cell in cells]


def paper_ways(scale: Scale, keep_rates: Sequence[float] | None = None) -> Ways:
    """The paper's table: dense, ToMe, and its ATC with three linkages."""
    rates = scale.keep_rates if keep_rates is None else keep_rates
    atc = cells_of(["atc"], rates, linkages=LINKAGES, variants=[PAPER])
    return ways_of([*cells_of([DENSE, "tome"], rates, of_method=scale.tome), *atc])


def own_ways(scale: Scale, keep_rates: Sequence[float] | None = None) -> Ways:
    """agglo's own mode: keys compared, groups weighed by their sizes."""
    rates = scale.keep_rates if keep_rates is None else keep_rates
    return ways_of(cells_of(["atc"], rates, linkages=LINKAGES, variants=[OWN]))


def compared_cells(keep_rates: Sequence[float], window: int = 8) -> list[Cell]:
    """Also the options that lie between the paper's ATC and agglo's own, and more. window: tokens per side of one."""
    atc = ["atc"]
    windows = f"atc-average, windows of {window} x {window}"
    in_windows: dict[str, Any] = {"window": window}
    by_need = {**in_windows, "spread": "need"}
    tokens = {"features": "tokens"}
    return [
        *cells_of(["tome"], keep_rates),
        *renamed("tome, first of each cell", cells_of(["tome"], keep_rates, of_method={"use_rand": False})),
        *cells_of(atc, keep_rates, linkages=LINKAGES, variants=[PAPER]),
        *renamed("atc-average, keys alone", cells_of(atc, keep_rates, common={"proportional": False})),
        *renamed("atc-average, proportional alone", cells_of(atc, keep_rates, of_method=tokens)),
        *cells_of(atc, keep_rates, linkages=LINKAGES),
        *renamed("atc-average, shared by the blocks", cells_of(atc, keep_rates, common={"share": "resolution"})),
        *renamed(windows, cells_of(atc, keep_rates, common=in_windows)),
        *renamed(f"{windows} by need", cells_of(atc, keep_rates, common=by_need)),
        *renamed("atc-average, neighbours only", cells_of(atc, keep_rates, common={"connectivity": "grid"})),
        *cells_of(["pool", "random"], keep_rates),
    ]


def pipeline_need() -> Need:
    return Need("weights", PIPELINE, "the folder of Stable Diffusion 1.5 as diffusers has it")


def workers_of(settings: Settings) -> Workers:
    """Which of several processes this is."""
    accelerator = one_of_several(settings.device)
    return Workers() if accelerator is None else Workers(accelerator.num_processes, accelerator.process_index)


def open_generator(settings: Settings, scale: Scale) -> Generator:
    """Stable Diffusion in half precision on a GPU, or the embedded generator."""
    how: dict[str, Any] = {"steps": scale.steps, "guidance": scale.guidance}
    if settings.miniature:
        return EmbeddedGenerator(**how)
    accelerator = one_of_several(settings.device)
    device = torch.device(settings.device) if accelerator is None else accelerator.device
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    return PipelineGenerator(str(settings.weights[PIPELINE]), device=device, dtype=dtype, **how)


def about_generator(generator: Generator) -> dict[str, Any]:
    """What decides the images, without the folders of a machine."""
    about = generator.about()
    return {"generator": {**about, "model": Path(str(about["model"])).name}}


def requests_of(settings: Settings, scale: Scale, number: int) -> list[Request]:
    """Of one set of seeds; those of the first are the paper's."""
    make = fashion_requests if settings.miniature else imagenet_requests
    return make(scale.per_class, seed=APART * number)


def image_cost(settings: Settings, scale: Scale) -> float:
    """Multiply-adds of one image, dense."""
    return scale.steps * (EMBEDDED_CALL if settings.miniature else PIPELINE_CALL)


def n_classes(miniature: bool) -> int:
    return embedded.N_CLASSES if miniature else 1000


def real_images(settings: Settings, scale: Scale) -> Iterator[Image]:
    """The first test images of Fashion-MNIST, or the first of each class of ImageNet by file name."""
    if settings.miniature:
        images, _ = read_split(settings.data[FASHION], "val")
        yield from pictures(torch.from_numpy(images[: scale.reference].copy())[:, None])
        return
    from agglo.classification.data import dataset_named

    listing = dataset_named(IMAGENET).read(settings.data[IMAGENET], "val")
    for index in first_of_each_class(listing, scale.reference // len(listing.classes)):
        yield listing.images.open(index)


def first_of_each_class(listing: Listing, count: int) -> list[int]:
    """Places of the first images of every class by file name, class by class."""
    by_class: dict[Any, list[int]] = {}
    for index, target in enumerate(listing.targets):
        by_class.setdefault(target, []).append(index)
    for label, name in enumerate(listing.classes):
        if (there := len(by_class.get(label, []))) < count:
            raise ValueError(f"class {name!r} has {there} images; the first {count} of each class are compared with")
    return [
        index
        for label in range(len(listing.classes))
        for index in sorted(by_class[label], key=listing.images.name)[:count]
    ]
