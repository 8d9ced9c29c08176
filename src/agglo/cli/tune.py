"""agglo tune"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agglo.classification.data import dataset_names
from agglo.cli.arguments import add_command, add_execution, add_import, add_model, device, model_spec, number, positive
from agglo.cli.grids import add_workers

_ABOUT = "name a speed or an accuracy, get the schedule"

_DETAILS = """\
Searches schedules and options of the methods together, so that the model is as fast, or loses as little, as you ask.
It needs no labels: outputs are kept near the dense model's. Speed is measured here, in turns with the dense model. Half
of the images are never searched on; what they show, with its standard error, is the report.

Writes OUT.json, which `agglo.apply(model, tuned="OUT.json")` takes, with every point that was tried; the front as
OUT.png; and the report as OUT.txt. A search that was stopped goes on where it was: type the same command again.
"""

_EXAMPLES = """\
examples:
  agglo tune deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors --data imagenet --speedup 2 -o tuned.json
  agglo tune deit_small_patch16_224 --pretrained --data imagenet --max-drop 1 --images 2000 -o small.json
  agglo tune deit_tiny_patch16_224 --pretrained --data imagenet --gflops 0.5 --minutes 30 -o half.json
  agglo tune hf:my-vit --data birds --speedup 1.5 -o mine.json
  agglo tune open_clip:ViT-B-32:openai --zero-shot --data imagenet --max-drop 1 -o clip.json
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "tune", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    add_model(parser, positional=True, zero_shot="the data set's")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of a data set, as for evaluate")
    data.add_argument("--dataset", metavar="NAME", help=f"{', '.join(dataset_names())} (default: found by its files)")
    data.add_argument(
        "--images", type=positive, default=1000, metavar="N", help="evenly spread over them (default: %(default)s)"
    )
    wanted = parser.add_argument_group("what is asked for").add_mutually_exclusive_group(required=True)
    wanted.add_argument("--speedup", type=number, metavar="X", help="times as fast as the dense model")
    wanted.add_argument("--max-drop", type=number, metavar="P", help="points of accuracy that may be lost")
    wanted.add_argument("--gflops", type=number, metavar="F", help="fraction of the dense model's GFLOPs that is left")
    how = parser.add_argument_group("how it is searched")
    how.add_argument("--method", nargs="+", default=["atc", "tome"], metavar="M", help="by name (default: atc tome)")
    add_import(how)
    how.add_argument("--minutes", type=number, default=10.0, metavar="T", help="about (default: %(default)g)")
    how.add_argument(
        "--candidates", type=positive, metavar="N", help="of each method, in place of what fits into the minutes"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    add_execution(how)
    add_workers(how)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.json", help="where to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.bench.model_report import require_plot_name
    from agglo.tuning.classifiers import FolderSettings, tune_on_folder

    output: Path = arguments.output
    if output.suffix != ".json":
        raise ValueError(f"-o {str(output)!r} must end in .json; a .png and a .txt are written beside it")
    picture = require_plot_name(output.with_suffix(".png"))
    spec = model_spec(arguments)
    if spec.has_random_weights:
        print("agglo: weights are random, and so is what is found; give --checkpoint or --pretrained", file=sys.stderr)
    settings = FolderSettings(
        model=spec,
        data=arguments.data,
        dataset=arguments.dataset,
        images=arguments.images,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        threads=arguments.threads,
        device=device(arguments),
        dtype=arguments.dtype,
    )
    tuned = tune_on_folder(
        settings,
        speedup=arguments.speedup,
        max_drop=arguments.max_drop,
        gflops=arguments.gflops,
        methods=tuple(arguments.method),
        minutes=arguments.minutes,
        candidates=arguments.candidates,
        seed=arguments.seed,
        path=output,
    )
    report = tuned.report()
    output.with_suffix(".txt").write_text(f"{report}\n", encoding="utf-8")
    tuned.plot(picture)
    print(report)
