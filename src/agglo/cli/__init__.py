"""What a person types: `agglo <command> ...`. Arguments are read here; the work is done in the rooms below."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agglo.cli import (
    backends,
    bench,
    demo,
    detect,
    evaluate,
    fid,
    finetune,
    generate,
    play,
    reproduce,
    train_generator,
    tune,
    visualize,
)
from agglo.cli.arguments import USAGE_ERROR, Parser
from agglo.hosts.swap import UnsupportedModelError
from agglo.version import __version__

_TRACEBACKS = "AGGLO_TRACEBACK"
_INTERRUPTED = 130
_PACKAGE = Path(__file__).parents[1]
_EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "torchmetrics", "tensorboard", "tqdm", "tomli", "safetensors"), "train"),
    "faster_coco_eval": "detection",
    "gradio": "web",
    "diffusers": "diffusion",
    **dict.fromkeys(("torchvision", "transformers", "open_clip", "timm")),
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
  agglo bench model --keep-rate 0.5 0.25 --linkage average complete --json speed.json --plot speed.png

`agglo <command> --help` tells more. Errors are one line; {_TRACEBACKS}=1 shows where they come from.
"""


def parser() -> Parser:
    """All commands. Each one says which function runs it."""
    top = Parser(
        prog="agglo",
        description="Faster vision transformers by exact agglomerative token clustering.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"agglo {__version__}")
    commands = top.add_subparsers(title="commands", metavar="<command>", dest="command", required=True)
    demo.add_to(commands)
    play.add_to(commands)
    visualize.add_to(commands)
    evaluate.add_to(commands)
    tune.add_to(commands)
    finetune.add_to(commands)
    detect.add_to(commands)
    generate.add_to(commands)
    fid.add_to(commands)
    train_generator.add_to(commands)
    reproduce.add_to(commands)
    bench.add_to(commands)
    backends.add_to(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0, or 2 for anything the person who typed it can mend."""
    chosen = parser().parse_args(arguments)
    try:
        with _own_warnings_in_one_line():
            if imported := getattr(chosen, "imports", []):
                from agglo.methods import import_methods

                import_methods(imported)
            code = chosen.run(chosen) or 0
            _leave_other_processes()
            return code
    except KeyboardInterrupt:
        print("agglo: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OSError, ImportError, UnsupportedModelError) as error:
        if os.environ.get(_TRACEBACKS):
            raise
        print(f"agglo: error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR


def _leave_other_processes() -> None:
    """Torch complains about processes that were started together and do not take leave of each other."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def _own_warnings_in_one_line() -> Iterator[None]:
    """Without the source line that Python adds, which is of no use to a person at a terminal."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: Any, filename: str, *rest: Any) -> None:
            if _PACKAGE in Path(filename).parents:
                print(f"agglo: {message}", file=sys.stderr)
            else:
                usual(message, category, filename, *rest)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get(error.name or "", "bench") or error.name
        return f"{error.name} is not installed and needed for this; pip install 'agglo[{extra}]' brings it"
    return " ".join(str(error).split()) or type(error).__name__
