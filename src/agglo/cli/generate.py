"""agglo generate: images by a diffusion model, dense and with its tokens merged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agglo.cli.arguments import add_command, device, method_options, number, positive, whole

if TYPE_CHECKING:
    from agglo.synthesis.data.requests import Request
    from agglo.synthesis.evaluation.generators import Generator

_ABOUT = "generate images by a diffusion model, dense and with its tokens merged"

_DETAILS = """\
Generate the same images, prompt by prompt and seed by seed, with a diffusion model as it is and with its tokens merged
by several methods at several keep rates.

MODEL is a pipeline of diffusers (a folder, or a name on the hub), or `embedded`, a small model that
makes clothes of ten classes instead of prompts; --weights takes what `agglo train-generator` wrote.
The folder gets one folder of PNGs for each method and keep rate, for `agglo fid`; each PNG holds its prompt, its seed
and the seconds it took. record.json holds the settings and the times, sheet.png the first images side by side. The same
command goes on where an earlier one was stopped or killed; other methods and keep rates are added, other settings are
refused. On several GPUs: accelerate launch -m agglo generate ...

--imagenet is the paper's protocol: "A high quality photograph of a {class}." for 1000 classes, 2 images each, 50 steps,
guidance 7.5, the pipeline's own scheduler (PNDM), images named {class}_{number} with the digits of both as the seed.
The paper's atc is --variant paper, its ToMe --option use_rand=false.
"""

_EXAMPLES = """\
examples:
  agglo generate embedded --per-class 4 --method dense tome atc --keep-rate 0.5 --output generated --groups 12
  agglo generate stable-diffusion-v1-5 --imagenet --per-class 2 --output sd --device cuda --dtype float16 \\
      --method dense tome atc --linkage single average complete --variant paper --option use_rand=false \\
      --keep-rate 0.9 0.8 0.7 0.6 0.5 0.4
  agglo fid imagenet-val-5000 sd/atc-average-paper_keep0.5 --device cuda
  agglo generate sdxl-folder --prompts prompts.txt --method dense atc --keep-rate 0.5 --every 5 --output xl
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "generate", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("model", nargs="?", default="embedded", metavar="MODEL", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the images")
    _add_what(parser)
    _add_reductions(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--weights", type=Path, metavar="F", help="of the embedded model (default: those in agglo)")
    how.add_argument("--steps", type=positive, metavar="N", help="of denoising (default: 50; embedded 25)")
    how.add_argument("--guidance", type=number, metavar="G", help="classifier-free (default: 7.5; embedded 1)")
    how.add_argument("--scheduler", metavar="S", help="a scheduler of diffusers (default: the pipeline's own)")
    how.add_argument("--size", type=positive, nargs=2, metavar=("H", "W"), help="in pixels (default: the model's own)")
    how.add_argument("--batch-size", type=positive, default=1, metavar="N", help="(default: %(default)s)")
    how.add_argument(
        "--device", help="cpu, cuda, cuda:1, mps (default: this process's under accelerate, else the best)"
    )
    how.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 (default: %(default)s)")
    pictures = parser.add_argument_group("pictures")
    pictures.add_argument(
        "--sheet", type=whole, default=8, metavar="N", help="images on sheet.png; 0 is none (default: %(default)s)"
    )
    pictures.add_argument(
        "--groups",
        type=whole,
        metavar="STEP",
        help="draw the groups of this step, from 0, over the first images of the sheet: groups/<method>.png",
    )
    parser.set_defaults(run=run)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is generated")
    which = what.add_mutually_exclusive_group()
    which.add_argument("--prompts", type=Path, metavar="F", help="a text file with one prompt per line")
    which.add_argument("--imagenet", action="store_true", help="the paper's prompts for the 1000 classes of ImageNet")
    what.add_argument("--per-class", type=positive, default=2, metavar="N", help="or prompt (default: %(default)s)")
    what.add_argument("--classes", type=whole, nargs="+", metavar="C", help="only these, from 0 (default: all)")
    what.add_argument("--seed", type=whole, default=0, metavar="N", help="added to all seeds (default: %(default)s)")


def _add_reductions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("token reduction")
    group.add_argument(
        "--method",
        nargs="+",
        default=["dense", "tome", "atc"],
        metavar="M",
        help="dense, atc, tome (tomesd's), pool, random, ... (default: dense tome atc)",
    )
    group.add_argument("--keep-rate", nargs="+", type=number, default=[0.5], metavar="R", help="(default: 0.5)")
    group.add_argument("--linkage", nargs="+", default=["average"], metavar="L", help="of atc (default: average)")
    group.add_argument(
        "--variant",
        nargs="+",
        default=["own"],
        metavar="V",
        help="of atc: own (keys, proportional attention), paper (block inputs, neither) (default: own)",
    )
    group.add_argument("--proportional", choices=["on", "off"], help="(default: the method's)")
    group.add_argument("--features", metavar="F", help="tokens, keys, keys_per_head, values (default: the method's)")
    group.add_argument("--max-downsample", type=positive, metavar="D", help="coarsest tokens (default: the finest)")
    group.add_argument("--merge", nargs="+", metavar="P", help="attn, cross, mlp (default: attn)")
    group.add_argument("--share", metavar="S", help="groups per block, or one per resolution (default: block)")
    group.add_argument("--every", type=positive, metavar="N", help="steps that keep their groups (default: 1)")
    group.add_argument("--drift", type=number, metavar="D", help="keep groups until features have moved by this much")
    group.add_argument(
        "--option", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="of the methods that have it"
    )


_COMMON = ("max_downsample", "merge", "share", "every", "drift")


def run(arguments: argparse.Namespace) -> None:
    from agglo.synthesis.evaluation.cells import cells_of
    from agglo.synthesis.evaluation.grid import Workers, generate

    common = {name: getattr(arguments, name) for name in _COMMON if getattr(arguments, name) is not None}
    if arguments.proportional is not None:
        common["proportional"] = arguments.proportional == "on"
    of_method = method_options(arguments.option)
    if arguments.features is not None:
        of_method["features"] = arguments.features
    cells = cells_of(
        arguments.method,
        arguments.keep_rate,
        linkages=arguments.linkage,
        variants=arguments.variant,
        common=common,
        of_method=of_method,
    )
    requests = _requests(arguments)
    if not _is_distributed():
        workers, chosen = Workers(), device(arguments)
    else:
        import torch
        from accelerate import PartialState

        # Unless told, Accelerate takes each of several processes without a GPU for a run of its own.
        state = PartialState(cpu=not torch.accelerator.is_available())
        workers, chosen = Workers(state.num_processes, state.process_index), arguments.device or str(state.device)
    generator = _generator(arguments, chosen)
    generate(generator, cells, requests, arguments.output, batch_size=arguments.batch_size, workers=workers)
    if workers.index == 0:
        _draw(arguments, generator, cells, requests)


def _is_distributed() -> bool:
    import os

    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _requests(arguments: argparse.Namespace) -> list[Request]:
    from agglo.synthesis.data import requests

    embedded = arguments.model == "embedded"
    chosen: dict[str, Any] = {"seed": arguments.seed}
    if arguments.prompts is not None:
        if embedded or arguments.classes:
            raise ValueError("--prompts are for pipelines, and go without --classes; the embedded model has classes")
        return requests.prompt_requests(arguments.prompts, arguments.per_class, **chosen)
    if embedded == arguments.imagenet:
        raise ValueError(
            "--imagenet is for pipelines" if embedded else "say what to generate: --imagenet, or --prompts F"
        )
    make = requests.fashion_requests if embedded else requests.imagenet_requests
    return make(arguments.per_class, classes=arguments.classes, **chosen)


def _generator(arguments: argparse.Namespace, device: str) -> Generator:
    from agglo.experiments.devices import dtype_named, require_device
    from agglo.synthesis.evaluation.generators import EmbeddedGenerator, PipelineGenerator

    named = ("steps", "guidance")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in named if getattr(arguments, name) is not None}
    given |= {"device": require_device(device), "dtype": dtype_named(arguments.dtype)}
    if arguments.model == "embedded":
        for name in ("scheduler", "size"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} is for pipelines; the embedded model has its own")
        return EmbeddedGenerator(weights=arguments.weights, **given)
    if arguments.weights is not None:
        raise ValueError(f"--weights {arguments.weights} is for the embedded model; a pipeline brings its own")
    size = None if arguments.size is None else tuple(arguments.size)
    return PipelineGenerator(arguments.model, size=size, scheduler=arguments.scheduler, **given)


def _draw(arguments: argparse.Namespace, generator: Generator, cells: list[Any], requests: list[Request]) -> None:
    from agglo.synthesis.evaluation.sheets import contact_sheet, groups_sheet

    shown = requests[: arguments.sheet]
    if shown:
        path = arguments.output / "sheet.png"
        contact_sheet(arguments.output, cells, shown).save(path)
        print(path)
    if arguments.groups is not None:
        (arguments.output / "groups").mkdir(exist_ok=True)
        for cell in cells:
            if cell.options:
                path = arguments.output / "groups" / f"{cell.name}.png"
                groups_sheet(generator, cell, shown or requests[:1], arguments.groups).save(path)
                print(path)
