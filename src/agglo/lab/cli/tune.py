"""Search the schedule and options that reach a speed or an accuracy.

Searches schedules and options of the methods together, so that the model is as fast, or loses as little, as you ask.
It needs no labels: outputs are kept near the dense model's. Speed is measured here, in turns with the dense model. Half
of the images are never searched on; what they show, with its standard error, is the report.

Writes OUT.json, which `agglo.apply(model, tuned="OUT.json")` takes, with every config that was tried; the front as
OUT.png; and the report as OUT.txt. A search that was stopped continues where it was: type the same command again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from agglo.lab.options import (
    IMPORT_HELP,
    AtLeastOne,
    ExecutionOptions,
    ModelOptions,
    Whole,
    ZeroShotOptions,
    device_or_best,
    matching,
    option,
    require_plot_name,
)
from agglo.lab.tasks.classification.data import dataset_names
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings
from agglo.lab.tasks.classification.tuning import tune_on_folder
from agglo.tuning import TuneSettings

EXAMPLES = """\
examples:
  agglo tune deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors --data imagenet --speedup 2 -o tuned.json
  agglo tune deit_small_patch16_224 --pretrained --data imagenet --max-drop 1 --images 2000 -o small.json
  agglo tune deit_tiny_patch16_224 --pretrained --data imagenet --gflops 0.5 --minutes 30 -o half.json
  agglo tune hf:my-vit --data birds --speedup 1.5 -o mine.json
  agglo tune open_clip:ViT-B-32:openai --zero-shot --data imagenet --max-drop 1 -o clip.json
"""


@dataclass(frozen=True, kw_only=True)
class Options(ZeroShotOptions, ExecutionOptions):
    """What to search."""

    GROUP: ClassVar = "data"
    ASKED: ClassVar = "what is asked for"
    HOW: ClassVar = ExecutionOptions.GROUP

    model: str = option(help=ZeroShotOptions.MODEL_HELP, positional=True, metavar="MODEL", group=ModelOptions.GROUP)
    output: Path = option(help="where to write", flags=("-o", "--output"), metavar="OUT.json", group=None)
    data: Path = option(help="folder of a data set, as for evaluate", metavar="DIR")
    dataset: str | None = option(None, f"{', '.join(dataset_names())} (default: found by its files)")
    images: AtLeastOne = option(1000, "evenly spread over them")
    speedup: float | None = option(None, "times as fast as the dense model", group=ASKED, exclusive="required")
    max_drop: float | None = option(None, "points of accuracy that may be lost", group=ASKED, exclusive="required")
    gflops: float | None = option(
        None, "fraction of the dense model's GFLOPs that is left", group=ASKED, exclusive="required"
    )
    method: Sequence[str] = option(("atc", "tome"), "by name", metavar="M", group=HOW)
    imports: Sequence[str] = option(
        [], IMPORT_HELP, flags=("--import",), metavar="MODULE", nargs=None, action="append", group=HOW
    )
    minutes: float = option(10.0, "about", metavar="T", group=HOW)
    candidates: AtLeastOne | None = option(None, "of each method, in place of what fits into the minutes", group=HOW)
    seed: int = option(0, group=HOW)
    workers: Whole = option(2, "that read images", group=HOW)


def run(options: Options) -> None:
    output = options.output
    if output.suffix != ".json":
        raise ValueError(f"-o {str(output)!r} must end in .json; a .png and a .txt are written beside it")
    plot = require_plot_name(output.with_suffix(".png"))
    own = {"model": options.trained_spec(), "device": device_or_best(options.device)}
    tuned = tune_on_folder(
        EvaluationSettings(**{**matching(EvaluationSettings, options), **own}),
        **{name: getattr(options, name) for name in ("speedup", "max_drop", "gflops", "minutes")},
        path=output,
        settings=TuneSettings(methods=options.method, candidates=options.candidates, seed=options.seed),
    )
    report = tuned.report()
    output.with_suffix(".txt").write_text(f"{report}\n", encoding="utf-8")
    tuned.plot(plot)
    print(report)
