"""What the README's first screen shows: the moving picture, the methods side by side, and its table of numbers.

    make readme-figures CHECKPOINT=deit_tiny_patch16_224.safetensors

Pictures are of the photo that comes with agglo. Numbers are read from results, where `make off-the-shelf` and
`make bench-model` put them, and written into README.md between two marks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from agglo.bench.model_report import plot
from agglo.classification.evaluation.pictures import animate, visualize
from agglo.drawing.animation import save_animation
from agglo.embedded.classifier import PHOTO
from agglo.experiments.models import ModelSpec
from agglo.experiments.tables import Column, Table
from agglo.experiments.variants import variants_of
from agglo.methods import create
from agglo.reproduce.pages import write_between_marks
from agglo.reproduce.record import read_results

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "results", ROOT / "docs" / "images"
MODEL = "deit_tiny_patch16_224"
_SHOWN = {"tome": "ToMe", "atc average": "ATC"}

Report = dict[str, Any]


def numbers(accuracy: list[Report], speed: Report) -> str:
    """Markdown: top-1 of `agglo reproduce off-the-shelf`, speeds of `agglo bench model`, for what is in both.

    Speeds are medians of ratios within a repeat, against two dense models: the one that passes a batch a few images at
    a time, as all reduced ones do ("free" at keep rate 1: nothing is merged), and timm's own.
    """
    here = [result for result in accuracy if (result["model"], result["data"]) == (MODEL, "imagenet")]
    top1 = {(result["method"], result["keep_rate"]): result.get("top1") for result in here}
    images = next(result["images"] for result in here if "images" in result)
    timed = {(result["name"], result["keep_rate"]): result["images_per_second"] for result in speed["results"]}
    if ("free", 1.0) not in timed:
        raise ValueError("the speeds have no row for keep rate 1, which says what slicing alone is worth")
    dense, sliced = timed["dense", None], timed["free", 1.0]
    rows: list[list[Any]] = [["dense", top1["dense", None], _times(sliced, sliced), _times(sliced, dense)]]
    rates = sorted({rate for _, rate in timed if rate is not None and rate < 1}, reverse=True)
    for rate in rates:
        for name, shown in _SHOWN.items():
            title = f"{shown}, keep rate {rate:g}"
            if (name, rate) in timed and top1.get((name, rate)) is not None:
                own = timed[name, rate]
                rows.append([title, top1[name, rate], _times(own, sliced), _times(own, dense)])
            else:
                rows.append([title, "cannot", None, None])
    columns = [Column("DeiT-Tiny, off the shelf", left=True), Column("top-1", ".1f")]
    columns += [Column("speed"), Column("speed with slicing")]
    machine = speed["machine"]
    where = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}"
    about = (
        f"{images} ImageNet images (`make off-the-shelf`); batches of {speed['settings']['batch_size']}, "
        f"{where} (`make bench-model`)."
    )
    return f"{Table(columns, rows).markdown()}\n\n{about}"


def _times(one: list[float], other: list[float]) -> str:
    return f"{median(a / b for a, b in zip(one, other, strict=True)):.2f}x"


def recorded() -> tuple[list[Report], Report]:
    """What the README's numbers are made of."""
    speed = json.loads((RESULTS / "bench" / "model.json").read_text(encoding="utf-8"))
    return read_results(RESULTS / "off-the-shelf"), speed


def main() -> None:
    parser = argparse.ArgumentParser(description="make the pictures and numbers of the README")
    parser.add_argument("--checkpoint", type=Path, required=True, help=f"weights of {MODEL}")
    checkpoint = parser.parse_args().checkpoint
    spec = ModelSpec(MODEL, checkpoint)
    save_animation(animate(spec, PHOTO, create("atc")), IMAGES / "groups.gif")
    variants = variants_of(["tome", "atc"], keep_rates=[0.5], linkages=["single", "average", "complete"])
    visualize(spec, [PHOTO], variants).save(IMAGES / "methods.jpg", quality=88)
    plot(recorded()[1], IMAGES / "model-speed.png")
    write_between_marks(ROOT / "README.md", "numbers", numbers(*recorded()))


if __name__ == "__main__":
    main()
