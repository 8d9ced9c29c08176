"""Print the Frechet distance between two sets of images.

It is computed as in the ATC paper: clean-fid's resizing (bicubic,
antialiased, without rounding), the features of Inception-v3, means and covariances, in float64.

A and B are folders of images, or .npz files with mu and sigma: those that --keep writes, or another library's.
The distance is biased: fewer images give a larger one. Compare only those of equal numbers of images; the paper has
2000 generated and 5000 real ones. With no more images than features (2048) a warning tells so.
Inception's weights are downloaded once from where clean-fid has them, or read from --weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agglo.lab.options import AtLeastOne, device_or_best, option
from agglo.lab.tasks.synthesis.evaluation.fid import features_named, frechet_distance, statistics_of
from agglo.utils.devices import require_device
from agglo.utils.files import require_output

EXAMPLES = """\
examples:
  agglo fid generated/atc_keep0.5 imagenet-val-5000
  agglo fid imagenet-val-5000 generated/dense --keep imagenet.npz
  agglo fid imagenet.npz generated/tomesd_keep0.5 --weights inception-2015-12-05.pt --device cuda
  agglo fid fashion generated/dense --features classifier
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare."""

    a: Path = option(help="folder of images, or .npz of statistics", positional=True, metavar="A")
    b: Path = option(help="the same", positional=True, metavar="B")
    features: str = option("inception", "inception, classifier")
    weights: Path | None = option(None, "TorchScript of Inception (default: downloaded)")
    keep: Path | None = option(None, "keep the statistics of A in a file", metavar="F.npz")
    batch_size: AtLeastOne = option(32)
    device: str | None = option(None, "cpu, cuda, cuda:1, mps (default: the best there is)", metavar="D")


def run(options: Options) -> None:
    for source in (options.a, options.b):
        if not source.exists():
            raise ValueError(f"{str(source)!r} does not exist; a folder of images or an .npz file is accepted")
    if options.keep is not None:
        if options.a.suffix == ".npz":
            raise ValueError(f"--keep {options.keep} is for a folder of images; {str(options.a)!r} holds statistics")
        require_output(options.keep)
    chosen = require_device(device_or_best(options.device))
    # Two files of statistics need no features, so no download of what computes them.
    features = cache(lambda: features_named(options.features, weights=options.weights, device=chosen))
    a = statistics_of(options.a, features, batch_size=options.batch_size, keep=options.keep)
    b = statistics_of(options.b, features, batch_size=options.batch_size)
    print(f"{frechet_distance(a, b):.4f}")
