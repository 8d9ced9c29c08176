"""Image synthesis: Frechet distances over keep rates, and sample grids of the same seeds, dense and reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agglo.config import ReductionConfig
from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.evaluation.grid import one_of_several
from agglo.lab.paper import compare
from agglo.lab.paper.classifiers import FASHION, LINKAGES, data_need
from agglo.lab.paper.compare import DENSE, Value, percent
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, Study, StudyCell
from agglo.lab.tasks.synthesis.data.requests import Request, fashion_requests, imagenet_requests
from agglo.lab.tasks.synthesis.evaluation.fid import (
    Statistics,
    features_named,
    features_of,
    frechet_distance,
    opened,
    statistics_of,
)
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator, pil_images
from agglo.lab.tasks.synthesis.evaluation.grid import GenerationCell, file_of, generate, panel_pixels, relative_errors

if TYPE_CHECKING:
    from PIL.Image import Image

    from agglo.lab.tasks.classification.data import ClassificationData

PIPELINE, IMAGENET, INCEPTION, CLASSIFIER = "stable-diffusion-v1-5", "imagenet", "inception", "classifier"
APART = 10_000_000  # between the seeds of two sets
_FEATURES = {CLASSIFIER: "the embedded classifier's features", INCEPTION: "Inception's features"}
# In miniature Inception, which takes longer than generating, looks at the images of these keep rates.
_INCEPTION_RATES = (None, 0.5, 0.4)
# Class and image: a magpie, a trash can, a sarong and an eggnog; in miniature a T-shirt, trousers, a bag and a boot.
SHOWN = ("18_1", "412_1", "775_1", "969_0")
MINIATURE_SHOWN = ("0_0", "1_0", "8_0", "9_0")
_MAIN_RATES = (0.8, 0.6, 0.4)  # of the figure in the paper itself, which shows the first image

Reductions = dict[tuple[str, float | None], GenerationCell]  # by name and keep rate; the dense model has none

# The paper compares block inputs and adds nothing to the attention logits.
_PLAIN = {"features": "tokens", "proportional": False}
PAPER: dict[str, dict[str, Any]] = {f"atc-{name}-paper": {"linkage": name, **_PLAIN} for name in LINKAGES}
# agglo's own mode: keys compared, groups weighed by their sizes.
OWN: dict[str, dict[str, Any]] = {f"atc-{name}": {"linkage": name} for name in LINKAGES}


def reductions(options: Mapping[str, Mapping[str, Any]], keep_rates: Sequence[float]) -> Reductions:
    """Return every reduction at every keep rate.

    A name begins with its method. ATC's linkage is average, and all tokens are clustered at once, as in the paper.

    >>> list(reductions({"atc-single": {"linkage": "single"}}, [0.5]))
    [('atc-single', 0.5)]
    """
    found: Reductions = {}
    for name, own in options.items():
        method = "tomesd" if name.startswith("tome") else name.partition("-")[0]
        how = {"linkage": "average", "window": "all", **own} if method == "atc" else own
        for rate in keep_rates:
            config = ReductionConfig.of(method, keep_rate=rate, **how)
            found[name, rate] = GenerationCell(f"{name}_keep{rate:g}", config)
    return found


@dataclass(frozen=True)
class GeneratorScale:
    """Images, steps and keep rates of a study of image synthesis."""

    keep_rates: tuple[float, ...]
    per_class: int  # images of a class in a set of seeds
    sets: int
    steps: int
    guidance: float
    batch_size: int
    reference: int  # real images that they are compared with
    tome: dict[str, Any] = field(default_factory=dict)  # the paper's most likely kept the first token of each cell
    embedded: bool = False  # whether the embedded generator and Fashion-MNIST stand in

    @property
    def generator_needs(self) -> tuple[Need, ...]:
        about = "the folder of Stable Diffusion 1.5 as diffusers has it"
        return () if self.embedded else (Need("weights", PIPELINE, about),)

    @property
    def reductions(self) -> Reductions:
        """Dense and ToMe, the paper's ATC with three linkages, and agglo's own."""
        reduced = reductions({"tome": self.tome, **PAPER, **OWN}, self.keep_rates)
        return {(DENSE, None): GenerationCell(DENSE), **reduced}

    def requests(self, number: int) -> list[Request]:
        """Return what is generated for one set of seeds; those of the first are the paper's."""
        make = fashion_requests if self.embedded else imagenet_requests
        return make(self.per_class, seed=APART * number)

    def shown(self) -> list[Request]:
        """Return what the sample grids show, with the paper's seeds."""
        wanted = MINIATURE_SHOWN if self.embedded else SHOWN
        return [request for request in self.requests(0) if request.name in wanted]


FULL = GeneratorScale((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 2, 1, 50, 7.5, 1, 5000, {"use_rand": False})
MINIATURE = GeneratorScale((0.9, 0.7, 0.5, 0.4), 15, 3, 20, 1.0, 50, 1000, embedded=True)


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
    about = generator.about
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


def first_of_each_class(listing: ClassificationData, count: int) -> list[int]:
    """Return the indices of the first images of every class by file name, class by class."""
    found = []
    for label, name in enumerate(listing.classes):
        here = [index for index, target in enumerate(listing.targets) if target == label]
        if len(here) < count:
            raise ValueError(f"class {name!r} has {len(here)} images; the first {count} of each class are needed")
        found += sorted(here, key=listing.images.name)[:count]
    return found


# Frechet distances.


def _axes(scale: GeneratorScale, settings: Settings) -> Iterator[StudyCell]:
    inception = Need("weights", INCEPTION, "TorchScript of Inception-v3, inception-2015-12-05.pt")
    for method, rate in scale.reductions:
        for kind in _FEATURES if scale.embedded else [INCEPTION]:
            if scale.embedded and kind == INCEPTION and rate not in _INCEPTION_RATES:
                continue
            needs = (data_need(FASHION if scale.embedded else IMAGENET), *scale.generator_needs)
            for seed in range(settings.seeds or scale.sets):
                about = {"method": method, "keep_rate": rate, "features": kind, "seed": seed}
                yield StudyCell(about, (*needs, inception) if kind == INCEPTION else needs)


def _run(scale: GeneratorScale, settings: Settings) -> RunCell:
    processes, folder = one_of_several(settings.device), settings.run_folder("diffusion-fid")
    generator = cache(lambda: open_generator(settings, scale))

    @cache
    def features(kind: str) -> Any:
        weights = settings.weights[INCEPTION] if kind == INCEPTION else None
        return features_named(kind, weights=weights, device=settings.device)

    def kept(path: Path, compute: Callable[[], Statistics]) -> Statistics:
        if not path.exists():
            compute().save(path)
        return Statistics.load(path)

    def of_real_images(kind: str) -> Statistics:
        real = real_images(settings, scale)
        return Statistics.of(features_of(real, features(kind), scale.reference, name="real images"))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell, kind = scale.reductions[about["method"], about["keep_rate"]], about["features"]
        images, requests = folder / f"set{about['seed']}", scale.requests(about["seed"])
        size = settings.batch_size or scale.batch_size
        made = generate(generator(), [cell], requests, images, batch_size=size, processes=processes)
        if processes is not None and not processes.is_main_process:
            return {}  # one process looks at the images
        reference = kept(folder / f"real{scale.reference}.{kind}.npz", lambda: of_real_images(kind))
        made_of = partial(statistics_of, images / cell.name, lambda: features(kind))
        return {
            "distance": frechet_distance(reference, kept(images / f"{cell.name}.{kind}.npz", made_of)),
            "images": len(requests),
            "reference_images": scale.reference,
            "seconds_per_image": made[cell.name]["seconds_median"],
            **sources(generator(), cell),
        }

    return run


def _table(results: Sequence[Result], scale: GeneratorScale) -> list[Section]:
    by_kind = {kind: [result for result in results if result["features"] == kind] for kind in _FEATURES}
    return [section for kind, here in by_kind.items() for section in _sections(here, kind, not scale.embedded)]


def _sections(results: Sequence[Result], kind: str, comparable: bool) -> list[Section]:
    dense = [result for result in results if result["method"] == DENSE]
    if not dense:
        return []
    found = compare.by_method(results, "keep_rate", "distance", comparable=comparable)
    base = {result["seed"]: result["distance"] for result in dense}
    apart = [{**r, "distance": r["distance"] - base[r["seed"]]} for r in results if r["seed"] in base]

    def measured(row: str, rate: float) -> Value | str | None:
        return compare.over_seeds(dense, "distance") if rate == 1.0 else found.measured(row, rate)

    def expected(row: str, rate: float) -> Value | None:
        return compare.printed_value("diffusion", row.removesuffix("-paper").replace("-", " "), rate)

    every = replace(found, columns=[1.0, *found.columns], measured=measured)
    papers = [method for method in found.rows if method == "tome" or method.endswith("-paper")]
    own = [method for method in found.rows if method not in papers]
    text = (
        f"By {_FEATURES[kind]}: {len(dense)} set{'s' if len(dense) > 1 else ''} of {dense[0]['images']} images against "
        f"{dense[0]['reference_images']} real ones; in brackets the standard deviation over sets."
    )
    if not comparable:
        text += " Printed numbers are of Stable Diffusion 1.5 and ImageNet: they cannot be compared with these."
    table = replace(every, rows=papers, expected=expected).table()
    parts = [Section(f"Frechet distance by {kind}: the paper's table", table, text)]
    if own:
        title = f"Frechet distance by {kind}: agglo's own mode, not in the paper"
        parts.append(Section(title, replace(every, rows=own).table()))
    table = replace(compare.by_method(apart, "keep_rate", "distance"), rows=[*papers, *own]).table()
    return [*parts, Section(f"Difference to dense with the same seeds, by {kind}", table)]


def _draw(results: Sequence[Result], scale: GeneratorScale, settings: Settings, folder: Path) -> list[Path]:
    panels = []
    for kind, title in _FEATURES.items():
        here = [result for result in results if result["features"] == kind]
        panels += compare.panel(here, "distance", f"by {title}", x_label="keep rate", y_label="Frechet distance")
    return compare.draw_panels(panels, folder / "distance.png", "bars: standard error over sets of seeds")


# Sample grids.


def _run_samples(scale: GeneratorScale, settings: Settings) -> RunCell:
    generator = cache(lambda: open_generator(settings, scale))
    processes, requests, cells = one_of_several(settings.device), scale.shown(), scale.reductions
    folder = settings.run_folder("diffusion-samples")

    def pixels(name: str) -> torch.Tensor:
        """Read the images (B, H, W, C) of a reduction."""
        images = opened(file_of(folder / name, request) for request in requests)
        return torch.from_numpy(np.stack([np.asarray(image) for image in images]))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell = cells[about["method"], about["keep_rate"]]
        # Dense images are there already, unless the folder was emptied after they had been noted.
        generate(generator(), [cells[DENSE, None], cell], requests, folder, processes=processes)
        apart = relative_errors(pixels(cell.name), pixels(DENSE)).tolist()
        by_image = dict(zip([request.name for request in requests], apart, strict=True))
        return {"error": mean(apart), "by_picture": by_image, **sources(generator(), cell)}

    return run


def _sample_table(results: Sequence[Result], scale: GeneratorScale) -> list[Section]:
    text = (
        f"Relative error of the pixels against the dense image of the same seed (%), mean over {len(SHOWN)} "
        "images. The paper prints images alone, no numbers."
    )
    table = compare.by_rate(results, lambda result: 100 * result["error"], ".1f")
    return [Section("Difference of the images to the dense ones", table, text)] if table.rows else []


def _draw_samples(results: Sequence[Result], scale: GeneratorScale, settings: Settings, folder: Path) -> list[Path]:
    """Draw the images in the folder of runs; where they are gone, the sheets stay as they were drawn."""
    images, requests = settings.run_folder("diffusion-samples"), scale.shown()
    done = {(result["method"], result["keep_rate"]) for result in results}
    cells = {key: cell for key, cell in scale.reductions.items() if key in done}
    if (DENSE, None) not in cells or len(cells) == 1:
        return []
    names = ["samples.png", *(f"samples-{request.name}.png" for request in requests)]
    if all(file_of(images / cell.name, request).exists() for cell in cells.values() for request in requests):
        rates = [rate for rate in scale.keep_rates if any(rate == other for _, other in cells)]
        main = [rate for rate in rates if rate in _MAIN_RATES] or rates
        chosen = [main, *([rates] * len(requests))]
        for name, request, some in zip(names, [requests[0], *requests], chosen, strict=True):
            _sheet(images, cells, request, some).save(folder / name)
    return [folder / name for name in names]


def _sheet(images: Path, cells: Reductions, request: Request, rates: Sequence[float]) -> Image:
    """Compose one row per keep rate, the dense image first in each; one column per method."""
    rows = []
    for rate in rates:
        keys = [key for key in cells if key[1] in (None, rate)]
        files = [file_of(images / cells[key].name, request) for key in keys]
        panels = [Panel(panel_pixels(image), name) for (name, _), image in zip(keys, opened(files), strict=True)]
        rows.append(Row(panels, f"{request.name}: {request.prompt}, {percent(rate)}"))
    return compose(rows)


DIFFUSION_FID = Study(
    name="diffusion-fid",
    shows="table sd",
    about="FID of Stable Diffusion 1.5 over keep rates, by the paper's protocol: 2000 images (two per class of "
    "ImageNet, 50 steps of PNDM, guidance 7.5) against the first five validation images per class; dense, ToMe, the "
    "paper's ATC with three linkages, and last, not in the paper, agglo's own mode",
    stands_in="The embedded generator and Fashion-MNIST stand in: three sets of 150 images against 1000 test images, "
    "by the embedded classifier's features and, where a file of it is found, by Inception's. ToMe draws its "
    "destinations, as tomesd does unless told otherwise.",
    gpu_hours="81",
    full=FULL,
    miniature=MINIATURE,
    axes=_axes,
    run=_run,
    table=_table,
    draw=_draw,
)
DIFFUSION_SAMPLES = Study(
    name="diffusion-samples",
    shows="figures sdViz and four supplementary ones",
    about="Images of Stable Diffusion 1.5 with the paper's seeds (a magpie, a trash can, a sarong, an eggnog): "
    "dense, ToMe, the paper's ATC with three linkages, and last, not in the paper, agglo's own mode, at six keep rates",
    stands_in="The embedded generator's T-shirt, trousers, bag and boot stand in.",
    gpu_hours="0.2",
    full=FULL,
    miniature=replace(MINIATURE, keep_rates=FULL.keep_rates, per_class=2),
    axes=lambda scale, settings: (
        StudyCell({"method": method, "keep_rate": rate}, scale.generator_needs) for method, rate in scale.reductions
    ),
    run=_run_samples,
    table=_sample_table,
    draw=_draw_samples,
)
ITEMS = (DIFFUSION_FID, DIFFUSION_SAMPLES)
