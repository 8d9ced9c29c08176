"""agglo fid: how far generated images are from real ones."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

from agglo.cli.arguments import add_command, device, positive

_ABOUT = "Frechet distance between two sets of images"

_DETAILS = """\
The Frechet distance (FID) between two sets of images, as the ATC paper computes it: clean-fid's resizing (bicubic,
antialiased, without rounding), the features of Inception-v3, means and covariances, in float64.

A and B are folders of images, or .npz files with mu and sigma: those that --keep writes, or another library's.
The distance is biased: fewer images give a larger one. Compare only those of equal numbers of images; the paper has
2000 generated and 5000 real ones. With no more images than features (2048) a warning tells so.
Inception's weights are downloaded once from where clean-fid has them, or read from --weights.
"""

_EXAMPLES = """\
examples:
  agglo fid generated/atc-average-paper_keep0.5 imagenet-val-5000
  agglo fid imagenet-val-5000 generated/dense --keep imagenet.npz
  agglo fid imagenet.npz generated/tome_keep0.5 --weights inception-2015-12-05.pt --device cuda
  agglo fid fashion generated/dense --features classifier
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "fid", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("a", type=Path, metavar="A", help="folder of images, or .npz of statistics")
    parser.add_argument("b", type=Path, metavar="B", help="the same")
    parser.add_argument("--features", default="inception", help="inception, classifier (default: %(default)s)")
    parser.add_argument("--weights", type=Path, metavar="F", help="TorchScript of Inception (default: downloaded)")
    parser.add_argument("--keep", type=Path, metavar="F.npz", help="keep the statistics of A in a file")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.experiments.devices import require_device
    from agglo.experiments.files import require_output
    from agglo.synthesis.evaluation.features import features_named
    from agglo.synthesis.evaluation.fid import statistics_of
    from agglo.synthesis.evaluation.frechet import frechet_distance

    for source in (arguments.a, arguments.b):
        if not source.exists():
            raise ValueError(f"{str(source)!r} does not exist; a folder of images or an .npz file is accepted")
    if arguments.keep is not None:
        require_output(arguments.keep)
    chosen = require_device(device(arguments))
    # Two files of statistics need no features, so no download of what computes them.
    features = cache(lambda: features_named(arguments.features, weights=arguments.weights, device=chosen))
    size = arguments.batch_size
    a = statistics_of(arguments.a, features, batch_size=size, keep=arguments.keep)
    b = statistics_of(arguments.b, features, batch_size=size)
    print(f"{frechet_distance(a, b):.4f}")
