"""The commands `agglo <command> ...`: one module each, with its `Options` and `run(options)`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.cli.arguments import INTERRUPTED, USAGE_ERROR, Parser
from agglo.version import __version__

_TRACEBACKS = "AGGLO_TRACEBACK"
_PACKAGE = Path(__file__).parents[2]
_EXTRAS = {
    **dict.fromkeys(("accelerate", "torchmetrics", "tensorboard", "tqdm", "tomli", "safetensors"), "train"),
    "faster_coco_eval": "detection",
    "gradio": "web",
    "diffusers": "diffusion",
    **dict.fromkeys(("torchvision", "transformers", "open_clip", "timm")),
}

_COMMANDS = {
    "demo": "see it work: accuracy, speed and groups of a small model that comes with agglo",
    "play": "a page to play with: an image, a slider, the groups",
    "visualize": "draw which patches of an image are merged into which groups, stage by stage",
    "evaluate": "accuracy and speed of a classifier, dense and reduced, on a data set",
    "finetune": "train a classifier by a recipe, crash-safe, on any number of devices",
    "detect": "object detection and instance segmentation with reduced tokens: train, evaluate, show",
    "generate": "generate images by a diffusion model, dense and with its tokens merged",
    "fid": "Frechet distance between two sets of images",
    "train-generator": "train a small diffusion model on Fashion-MNIST, for agglo generate",
    "reproduce": "the tables and figures of the ATC paper, measured beside printed",
    "bench": "measure speed",
    "tune": "name a speed or an accuracy, get the schedule",
    "heal": "train what a reduction costs back into a model, without labels, in minutes",
    "backends": "which implementations of the clustering run on this machine, and why the others do not",
}
_EXAMPLES = f"""\
examples:
  agglo demo
  agglo play
  agglo backends
  agglo visualize cat.jpg --pretrained --keep-rate 0.25 -o groups.png
  agglo visualize cat.jpg --checkpoint deit.safetensors --linkage single average complete -o linkages.png
  agglo evaluate deit_tiny_patch16_224 --pretrained --data imagenet --keep-rate 0.7 0.5 --json shelf.json
  agglo tune deit_tiny_patch16_224 --pretrained --data imagenet --speedup 2 -o tuned.json
  agglo heal deit_tiny_patch16_224 --pretrained --data imagenet --keep-rate 0.5 -o healed.safetensors
  agglo bench model --keep-rate 0.5 0.25 --linkage average complete --json speed.json --plot speed.png

`agglo <command> --help` tells more. Errors are one line; {_TRACEBACKS}=1 shows where they come from.
"""


def parser() -> Parser:
    """Return the parser of all commands. The module of a command is imported once it is typed, and runs it."""
    top = Parser(
        prog="agglo",
        description="Faster vision transformers by exact agglomerative token clustering.",
        epilog=_EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"agglo {__version__}")
    commands = top.add_subparsers(title="commands", metavar="<command>", dest="command", required=True)
    for name, about in _COMMANDS.items():
        module = f"agglo.lab.cli.{name.replace('-', '_')}"
        commands.add_parser(name, help=about, load=partial(import_module, module))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, or 2 for anything the person who typed it can mend."""
    try:
        chosen = parser().parse_args(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            if imported := getattr(chosen, "imports", []):
                from agglo.methods import import_modules

                import_modules(imported)
            code = chosen.run(chosen) or 0
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()  # without which torch warns at exit
            return code
    except KeyboardInterrupt:
        print("agglo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ImportError, UnsupportedModelError) as error:
        if os.environ.get(_TRACEBACKS):
            raise
        print(f"agglo: error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR


def _show_warning(usual: Callable[..., None], message: Any, category: Any, filename: str, *rest: Any) -> None:
    """Show a warning of this package without the source line that Python adds."""
    if _PACKAGE in Path(filename).parents:
        print(f"agglo: {message}", file=sys.stderr)
    else:
        usual(message, category, filename, *rest)


def _one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get(error.name or "", "bench") or error.name
        return f"{error.name} is not installed and needed for this; pip install 'agglo[{extra}]' brings it"
    return " ".join(str(error).split()) or type(error).__name__
