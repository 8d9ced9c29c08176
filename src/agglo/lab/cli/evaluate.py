"""Measure the accuracy and speed of a classifier, dense and reduced, on a data set.

Top-1 and top-5, or mAP where images have several labels, of a model as it is and with its tokens reduced. Several
methods, linkages, keep rates or schedules make a grid; what a method cannot reach is shown as "cannot", with the
reason. With --json a run that was stopped goes on where it was: type the same command again.

Data sets, by the layout of DIR (docs/evaluate.md has the details):
{data_sets}

Images for timm's models are resized to 8/7 of the model's size and cropped in the middle, for others as the model's own
configuration says (--frame chooses); those of {whole} are not cropped.

MODEL is of timm by its plain name, or of another library:
  deit_tiny_patch16_224, hf-hub:ORG/NAME, local-dir:PATH      timm: by name, on the hub, in a folder
  hf:PATH, hf:ORG/NAME                                        transformers: a folder of save_pretrained, or on the hub
  torchvision:vit_b_16, torchvision:vit_b_16:TAG              torchvision; TAG is one of its weights
  open_clip:ViT-B-32, open_clip:ViT-B-32:TAG                  open_clip, likewise; also open_clip:local-dir:PATH
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from textwrap import indent
from typing import ClassVar

from agglo.lab.cli.arguments import GridOptions
from agglo.lab.evaluation.report import text
from agglo.lab.options import ExecutionOptions, ModelOptions, ZeroShotOptions, option
from agglo.lab.tasks.classification.data import dataset_named, dataset_names
from agglo.lab.tasks.classification.data.transforms import FRAMES
from agglo.lab.tasks.classification.evaluation.grid import METRICS, EvaluationSettings
from agglo.lab.tasks.classification.evaluation.grid import run as evaluate
from agglo.utils.tables import Column, Table

_DATASETS = [dataset_named(name) for name in dataset_names()]
_TABLE = Table([Column("name", left=True), Column("what DIR holds", left=True)], [[d.name, d.about] for d in _DATASETS])
DESCRIPTION = (__doc__ or "").format(
    data_sets=indent(_TABLE.text(), "  "),
    whole=", ".join(dataset.name for dataset in _DATASETS if dataset.squash or dataset.crop == 1),
)
EXAMPLES = """\
examples:
  agglo evaluate deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors --data imagenet --keep-rate 0.5
  agglo evaluate deit_small_patch16_224 --pretrained --data imagenet --method atc tome \\
      --linkage single average complete --keep-rate 0.9 0.7 0.5 0.25 --json shelf.json --plot shelf.png
  agglo evaluate vit_base_patch16_224.mae --checkpoint mae_finetuned_vit_base.pth --data imagenet \\
      --proportional off --schedule constant:8 constant:16 linear:8 linear:16
  agglo evaluate deit_small_patch16_224 --checkpoint birds.pth --data nabirds --method evit --keep-rate 0.7 --no-dense
  agglo evaluate hf:my-vit --data birds --keep-rate 0.7 0.5
  agglo evaluate torchvision:vit_b_16 --pretrained --data imagenet --keep-rate 0.5
  agglo evaluate open_clip:ViT-B-32:openai --zero-shot --data imagenet --keep-rate 0.5
  accelerate launch --num_processes 4 -m agglo evaluate deit_base_patch16_224 --pretrained --data imagenet --device cuda
"""


@dataclass(frozen=True, kw_only=True)
class Options(GridOptions, ZeroShotOptions):
    """What to evaluate."""

    GROUP: ClassVar = "data"

    model: str = option(help=ZeroShotOptions.MODEL_HELP, positional=True, metavar="MODEL", group=ModelOptions.GROUP)
    dataset: str | None = option(None, f"{', '.join(dataset_names())} (default: found by the files of DIR)")
    crop_pct: float | None = option(
        None, "side of the crop, as a fraction of the resized image's (default: as --frame says; the study's is 0.875)"
    )
    frame: str | None = option(
        None,
        "how images are resized and cropped: as in the study, or as the model's own configuration says (default: study "
        "for timm's models, model for all others)",
        choices=FRAMES,
        metavar=None,
    )
    cache: float = option(
        4.0,
        "keep images in memory for the next cell if all of them fit (default: 4 GB per process)",
        metavar="GB",
        group=ExecutionOptions.GROUP,
    )


def run(options: Options) -> None:
    own = {"model": options.trained_spec(), "crop": options.crop_pct, "cache_gigabytes": options.cache}
    report = evaluate(options.settings(EvaluationSettings, **own), options.json)
    options.tell(report, partial(text, task=METRICS), METRICS)
