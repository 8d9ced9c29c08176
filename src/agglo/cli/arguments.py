"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from agglo.study.model_loading import ModelSpec


USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and options that must be written out: what is added later breaks no script."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"agglo: error: {message}; see {self.prog} --help\n")


def add_model(
    parser: argparse.ArgumentParser, *, positional: bool = False, default: str | None = "deit_tiny_patch16_224"
) -> None:
    """--model or MODEL, and --checkpoint, --pretrained, --image-size, --num-classes.

    default: of --model; None is the model that comes with agglo.
    """
    group = parser.add_argument_group("model")
    if positional:
        group.add_argument("model", metavar="MODEL", help="a timm model")
    else:
        group.add_argument(
            "--model", default=default, metavar="NAME", help=f"a timm model (default: {default or 'the one in agglo'})"
        )
    weights = group.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint", type=Path, metavar="F", help="its weights: .safetensors, or a state dict saved by torch"
    )
    weights.add_argument("--pretrained", action="store_true", help="timm's published weights (downloads them)")
    group.add_argument(
        "--image-size",
        type=positive,
        nargs="+",
        metavar="N",
        help="pixels: one number, or height and width (default: the model's own)",
    )
    group.add_argument(
        "--num-classes",
        type=positive,
        metavar="N",
        help="classes of the head (default: the checkpoint's, or else the model's)",
    )


def model_spec(arguments: argparse.Namespace) -> ModelSpec:
    """What add_model's arguments say."""
    from agglo.study.model_loading import ModelSpec

    size = arguments.image_size
    if size is not None and len(size) > 2:
        raise ValueError(f"--image-size {' '.join(map(str, size))}: one number, or height and width, is accepted")
    return ModelSpec(
        name=arguments.model,
        checkpoint=arguments.checkpoint,
        pretrained=arguments.pretrained,
        image_size=None if size is None else (size[0], size[-1]),
        num_classes=arguments.num_classes,
    )


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def number(text: str) -> float:
    """Any number; what it may be is for the room below to say."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
