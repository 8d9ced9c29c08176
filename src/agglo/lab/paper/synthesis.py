"""What studies of image synthesis share: reductions, the generator, what is generated, real images beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.evaluation.cells import one_of_several
from agglo.lab.paper.classifiers import FASHION, LINKAGES, data_need
from agglo.lab.paper.compare import beside
from agglo.lab.paper.estimates import Size
from agglo.lab.paper.study import Need, Result, Settings
from agglo.lab.tasks.synthesis.data.requests import Request, fashion_requests, imagenet_requests
from agglo.lab.tasks.synthesis.evaluation.cells import DENSE, OWN, PAPER, GenerationCell, cells_of
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator, pil_images
from agglo.lab.tasks.synthesis.evaluation.grid import Workers
from agglo.utils.tables import Table

if TYPE_CHECKING:
    from PIL.Image import Image

    from agglo.lab.tasks.classification.data import Listing

PIPELINE, IMAGENET, INCEPTION = "stable-diffusion-v1-5", "imagenet", "inception"
APART = 10_000_000  # between the seeds of two sets
# The U-Net of Stable Diffusion 1.5 at 512 x 512, once for the prompt and once without it.
PIPELINE_CALL = 2 * 3.4e11
EMBEDDED_CALL = Size(64, 8, patches=256).multiply_adds()

Ways = dict[tuple[str, float | None], GenerationCell]


@dataclass(frozen=True)
class GeneratorScale:
    """What a study of image synthesis goes by, in full or in miniature.

    Attributes:
        embedded: Whether the embedded generator and Fashion-MNIST stand in.
        per_class, sets: Images of a class in a set of seeds, and sets.
        reference: Real images that they are compared with.
        tome: Options of the paper's ToMe, which most likely kept the first token of each cell.
        predicted, rounds: Images of single predictions, and rounds of timing, where options are compared.
    """

    keep_rates: tuple[float, ...]
    per_class: int
    sets: int
    steps: int
    guidance: float
    batch_size: int
    reference: int
    tome: dict[str, Any] = field(default_factory=dict)
    embedded: bool = False
    predicted: int = 64
    rounds: int = 7

    @property
    def image_cost(self) -> float:
        """Multiply-adds of one image, dense."""
        return self.steps * (EMBEDDED_CALL if self.embedded else PIPELINE_CALL)

    @property
    def generator_needs(self) -> tuple[Need, ...]:
        about = "the folder of Stable Diffusion 1.5 as diffusers has it"
        return () if self.embedded else (Need("weights", PIPELINE, about),)

    @property
    def data_needs(self) -> tuple[Need, ...]:
        return (data_need(FASHION if self.embedded else IMAGENET),)

    def requests(self, number: int, classes: Sequence[int] | None = None) -> list[Request]:
        """Return what is generated for one set of seeds; those of the first are the paper's."""
        make = fashion_requests if self.embedded else imagenet_requests
        return make(self.per_class, seed=APART * number, **({} if classes is None else {"classes": classes}))


FULL = GeneratorScale((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 2, 1, 50, 7.5, 1, 5000, {"use_rand": False})
MINIATURE = GeneratorScale((0.9, 0.7, 0.5, 0.4), 15, 3, 20, 1.0, 50, 1000, embedded=True)


def ways_of(cells: Iterable[GenerationCell]) -> Ways:
    """Return cells by name and keep rate; the dense model has none.

    >>> list(ways_of(cells_of(["dense", "atc"], [0.5])))
    [('dense', None), ('atc-average', 0.5)]
    """
    found: Ways = {}
    for cell in cells:
        name, _, rate = cell.name.rpartition("_keep")
        found[(name, float(rate)) if name else (cell.name, None)] = cell
    return found


def config_of(way: GenerationCell) -> dict[str, Any]:
    """Return the reduction of a way, for its result."""
    return {"config": None if way.config is None else way.config.to_dict()}


def renamed(name: str, cells: Sequence[GenerationCell]) -> list[GenerationCell]:
    """Return the same cells under another name, each with its keep rate behind it."""
    return [GenerationCell(f"{name}_keep{cell.name.rpartition('_keep')[2]}", cell.config) for cell in cells]


def paper_ways(scale: GeneratorScale) -> Ways:
    """Return the paper's table: dense, ToMe, and its ATC with three linkages."""
    atc = cells_of(["atc"], scale.keep_rates, linkages=LINKAGES, variants=[PAPER])
    tome = renamed("tome", cells_of(["tomesd"], scale.keep_rates, of_method=scale.tome))
    return ways_of([*cells_of([DENSE]), *tome, *atc])


def all_ways(scale: GeneratorScale) -> Ways:
    """Return the paper's table, and agglo's own mode: keys compared, groups weighed by their sizes."""
    own = cells_of(["atc"], scale.keep_rates, linkages=LINKAGES, variants=[OWN])
    return {**paper_ways(scale), **ways_of(own)}


def compared_cells(keep_rates: Sequence[float]) -> list[GenerationCell]:
    """Return also the options that lie between the paper's ATC and agglo's own, and more."""
    atc = ["atc"]
    windows = "atc-average, windows of 8 x 8"
    in_windows: dict[str, Any] = {"window": 8}
    by_need = {**in_windows, "spread": "need"}
    tokens = {"features": "tokens"}
    return [
        *renamed("tome", cells_of(["tomesd"], keep_rates)),
        *renamed("tome, first of each cell", cells_of(["tomesd"], keep_rates, of_method={"use_rand": False})),
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


def workers_of(settings: Settings) -> Workers:
    """Return which of several processes this is."""
    accelerator = one_of_several(settings.device)
    return Workers() if accelerator is None else Workers(accelerator.num_processes, accelerator.process_index)


def open_generator(settings: Settings, scale: GeneratorScale) -> Generator:
    """Open Stable Diffusion in half precision on a GPU, or the embedded generator."""
    how: dict[str, Any] = {"steps": scale.steps, "guidance": scale.guidance}
    if scale.embedded:
        return EmbeddedGenerator(**how)
    accelerator = one_of_several(settings.device)
    device = torch.device(settings.device) if accelerator is None else accelerator.device
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    return PipelineGenerator(str(settings.weights[PIPELINE]), device=device, dtype=dtype, **how)


def about_generator(generator: Generator) -> dict[str, Any]:
    """Return what decides the images, without the folders of a machine."""
    about = generator.about()
    return {"generator": {**about, "model": Path(str(about["model"])).name}}


def real_images(settings: Settings, scale: GeneratorScale) -> Iterator[Image]:
    """Yield the first test images of Fashion-MNIST, or the first of each class of ImageNet by file name."""
    if scale.embedded:
        images, _ = read_split(settings.data[FASHION], "val")
        yield from pil_images(torch.from_numpy(images[: scale.reference].copy())[:, None])
        return
    from agglo.lab.tasks.classification.data import dataset_named

    listing = dataset_named(IMAGENET).read(settings.data[IMAGENET], "val")
    for index in first_of_each_class(listing, scale.reference // len(listing.classes)):
        yield listing.images.open(index)


def first_of_each_class(listing: Listing, count: int) -> list[int]:
    """Return the indices of the first images of every class by file name, class by class."""
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


def by_rate(results: Sequence[Result], told: Callable[[Result], str]) -> Table:
    """Make a table with one line per method, one column per keep rate."""
    places = {(result["method"], result["keep_rate"]): told(result) for result in results}
    rates = sorted({rate for _, rate in places}, reverse=True)
    methods = list(dict.fromkeys(str(method) for method, _ in places))
    return beside(methods, rates, lambda row, rate: places.get((row, rate)))
