"""What studies of image synthesis share: reductions, the generator, what is generated, real images beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agglo.config import ReductionConfig
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.evaluation.cells import one_of_several
from agglo.lab.paper.classifiers import FASHION, LINKAGES, data_need
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.study import Need, Settings
from agglo.lab.tasks.synthesis.data.requests import Request, fashion_requests, imagenet_requests
from agglo.lab.tasks.synthesis.evaluation.cells import GenerationCell
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator, pil_images
from agglo.lab.tasks.synthesis.evaluation.grid import Workers

if TYPE_CHECKING:
    from PIL.Image import Image

    from agglo.lab.tasks.classification.data import Listing

PIPELINE, IMAGENET, INCEPTION = "stable-diffusion-v1-5", "imagenet", "inception"
APART = 10_000_000  # between the seeds of two sets

Reductions = dict[tuple[str, float | None], GenerationCell]  # by name and keep rate; the dense model has none

# The paper compares block inputs and adds nothing to the attention logits.
_PLAIN = {"features": "tokens", "proportional": False}
PAPER: dict[str, dict[str, Any]] = {f"atc-{name}-paper": {"linkage": name, **_PLAIN} for name in LINKAGES}
# agglo's own mode: keys compared, groups weighed by their sizes.
OWN: dict[str, dict[str, Any]] = {f"atc-{name}": {"linkage": name} for name in LINKAGES}


def reductions(options: Mapping[str, Mapping[str, Any]], keep_rates: Sequence[float]) -> Reductions:
    """Return every reduction at every keep rate. A name begins with its method; ATC's linkage is average.

    >>> list(reductions({"atc-single": {"linkage": "single"}}, [0.5]))
    [('atc-single', 0.5)]
    """
    found: Reductions = {}
    for name, own in options.items():
        method = "tomesd" if name.startswith("tome") else name.partition("-")[0]
        how = {"linkage": "average", **own} if method == "atc" else own
        for rate in keep_rates:
            config = ReductionConfig.of(method, keep_rate=rate, **how)
            found[name, rate] = GenerationCell(f"{name}_keep{rate:g}", config)
    return found


@dataclass(frozen=True)
class GeneratorScale:
    """Images, steps and keep rates of a study of image synthesis.

    Attributes:
        per_class, sets: Images of a class in a set of seeds, and sets.
        reference: Real images that they are compared with.
        tome: Options of the paper's ToMe, which most likely kept the first token of each cell.
        embedded: Whether the embedded generator and Fashion-MNIST stand in.
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

    @property
    def generator_needs(self) -> tuple[Need, ...]:
        about = "the folder of Stable Diffusion 1.5 as diffusers has it"
        return () if self.embedded else (Need("weights", PIPELINE, about),)

    @property
    def data_needs(self) -> tuple[Need, ...]:
        return (data_need(FASHION if self.embedded else IMAGENET),)

    @property
    def reductions(self) -> Reductions:
        """Dense and ToMe, the paper's ATC with three linkages, and agglo's own."""
        reduced = reductions({"tome": self.tome, **PAPER, **OWN}, self.keep_rates)
        return {(DENSE, None): GenerationCell(DENSE), **reduced}

    def requests(self, number: int, classes: Sequence[int] | None = None) -> list[Request]:
        """Return what is generated for one set of seeds; those of the first are the paper's."""
        make = fashion_requests if self.embedded else imagenet_requests
        return make(self.per_class, seed=APART * number, classes=classes)


FULL = GeneratorScale((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 2, 1, 50, 7.5, 1, 5000, {"use_rand": False})
MINIATURE = GeneratorScale((0.9, 0.7, 0.5, 0.4), 15, 3, 20, 1.0, 50, 1000, embedded=True)


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


def sources(generator: Generator, cell: GenerationCell) -> dict[str, Any]:
    """Return what decides the images, without the folders of a machine: the generator and its reduction."""
    about = generator.about()
    model = Path(str(about["model"])).name
    return {"config": cell.config and cell.config.to_dict(), "generator": {**about, "model": model}}


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
    found = []
    for label, name in enumerate(listing.classes):
        here = [index for index, target in enumerate(listing.targets) if target == label]
        if len(here) < count:
            raise ValueError(f"class {name!r} has {len(here)} images; the first {count} of each class are needed")
        found += sorted(here, key=listing.images.name)[:count]
    return found
