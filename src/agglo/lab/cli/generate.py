"""Generate images by a diffusion model, dense and with its tokens merged.

The images are the same, prompt by prompt and seed by seed, for the model as it is and for its tokens merged by several
methods at several keep rates.

MODEL is a pipeline of diffusers (a folder, or a name on the hub), or `embedded`, a small model that
makes clothes of ten classes instead of prompts; --weights takes what `agglo train-generator` wrote.
The folder gets one folder of PNGs for each method and keep rate, for `agglo fid`; each PNG holds its prompt, its seed
and the seconds it took. record.json holds the settings and the times, sheet.png the first images side by side. The same
command continues where an earlier one was stopped or killed; other methods and keep rates are added, other settings are
refused. On several GPUs: accelerate launch -m agglo generate ...

--imagenet is the paper's protocol: "A high quality photograph of a {class}." for 1000 classes, 2 images each, 50 steps,
guidance 7.5, the pipeline's own scheduler (PNDM), images named {class}_{number} with the digits of both as the seed.
The paper's ATC is atc:features=tokens,proportional=false,window=all, its ToMe tomesd:use_rand=false.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from agglo.lab.options import AtLeastOne, Whole, device_or_best, option
from agglo.lab.tasks.synthesis.data import requests as wanted
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator
from agglo.lab.tasks.synthesis.evaluation.grid import cells_of, contact_sheet, generate
from agglo.utils.devices import dtype_named, require_device

EXAMPLES = """\
examples:
  agglo generate embedded --per-class 4 --method dense tomesd atc --keep-rate 0.5 --output generated
  agglo generate stable-diffusion-v1-5 --imagenet --per-class 2 --output sd --device cuda --dtype float16 \\
      --method dense tomesd:use_rand=false atc:linkage=single,features=tokens,proportional=false,window=all \\
      --keep-rate 0.9 0.8 0.7 0.6 0.5 0.4
  agglo fid imagenet-val-5000 sd/tomesd-use_rand=false_keep0.5 --device cuda
  agglo generate sdxl-folder --prompts prompts.txt --method dense atc:every=5 --keep-rate 0.5 --output xl
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to generate, and how."""

    WHAT: ClassVar = "what is generated"
    REDUCTION: ClassVar = "token reduction"
    HOW: ClassVar = "how"

    model: str = option("embedded", positional=True, metavar="MODEL")
    output: Path = option(help="folder of the images", metavar="DIR")
    prompts: Path | None = option(None, "a text file with one prompt per line", exclusive=True, group=WHAT)
    imagenet: bool = option(False, "the paper's prompts for the 1000 classes of ImageNet", exclusive=True, group=WHAT)
    per_class: AtLeastOne = option(2, "or prompt", group=WHAT)
    classes: Sequence[Whole] | None = option(None, "only these, from 0 (default: all)", metavar="C", group=WHAT)
    seed: Whole = option(0, "added to all seeds", group=WHAT)
    method: Sequence[str] = option(
        ("dense", "tomesd", "atc"),
        "dense, atc, tomesd, pool, ..., with options as in atc:linkage=single,every=5 (docs/synthesis.md lists them)",
        metavar="M",
        group=REDUCTION,
    )
    keep_rate: Sequence[float] = option((0.5,), metavar="R", group=REDUCTION)
    weights: Path | None = option(None, "of the embedded model (default: those in agglo)", group=HOW)
    steps: AtLeastOne | None = option(None, "of denoising (default: 50; embedded 25)", group=HOW)
    guidance: float | None = option(None, "classifier-free (default: 7.5; embedded 1)", metavar="G", group=HOW)
    scheduler: str | None = option(
        None, "a scheduler of diffusers (default: the pipeline's own)", metavar="S", group=HOW
    )
    size: tuple[AtLeastOne, AtLeastOne] | None = option(
        None, "in pixels (default: the model's own)", metavar=("H", "W"), group=HOW
    )
    batch_size: AtLeastOne = option(1, group=HOW)
    device: str | None = option(
        None, "cpu, cuda, cuda:1, mps (default: this process's under accelerate, else the best)", metavar="D", group=HOW
    )
    dtype: str = option("float32", "float32, bfloat16, float16", metavar="DTYPE", group=HOW)
    sheet: Whole = option(8, "images on sheet.png; 0 is none", group=HOW)


def run(options: Options) -> None:
    cells = cells_of(options.method, options.keep_rate)
    requests = _requests(options)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        processes, chosen = None, device_or_best(options.device)
    else:
        from accelerate import PartialState

        # Unless told, Accelerate takes each of several processes without a GPU for a run of its own.
        processes = PartialState(cpu=not torch.accelerator.is_available())
        chosen = options.device or str(processes.device)
    generator = _generator(options, chosen)
    generate(generator, cells, requests, options.output, batch_size=options.batch_size, processes=processes)
    if options.sheet and (processes is None or processes.is_main_process):
        path = options.output / "sheet.png"
        contact_sheet(options.output, cells, requests[: options.sheet]).save(path)
        print(path)


def _requests(options: Options) -> list[Request]:
    embedded = options.model == "embedded"
    if options.prompts is not None:
        if embedded or options.classes:
            raise ValueError("--prompts are for pipelines, and go without --classes; the embedded model has classes")
        return wanted.prompt_requests(options.prompts, options.per_class, seed=options.seed)
    if embedded == options.imagenet:
        refusal = "--imagenet is for pipelines" if embedded else "say what to generate: --imagenet, or --prompts F"
        raise ValueError(refusal)
    make = wanted.fashion_requests if embedded else wanted.imagenet_requests
    return make(options.per_class, classes=options.classes, seed=options.seed)


def _generator(options: Options, device: str) -> Generator:
    given: dict[str, Any] = {"device": require_device(device), "dtype": dtype_named(options.dtype)}
    given |= {name: value for name in ("steps", "guidance") if (value := getattr(options, name)) is not None}
    if options.model == "embedded":
        for name in ("scheduler", "size"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} is for pipelines; the embedded model has its own")
        return EmbeddedGenerator(weights=options.weights, **given)
    if options.weights is not None:
        raise ValueError(f"--weights {options.weights} is for the embedded model; a pipeline brings its own")
    return PipelineGenerator(options.model, size=options.size, scheduler=options.scheduler, **given)
