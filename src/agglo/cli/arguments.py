"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from agglo.methods.base import PLACES
from agglo.patching import UNREAD
from agglo.schedule.text import EXAMPLES

if TYPE_CHECKING:
    from agglo.experiments.models import ModelSpec
    from agglo.experiments.variants import Variant


USAGE_ERROR = 2
MODEL_HELP = "a timm name, hf:PATH, torchvision:NAME, open_clip:NAME, ... (docs/evaluate.md#models)"
SCHEDULE_HELP = f"a schedule, such as {EXAMPLES} (docs/evaluate.md lists all)"


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and options that must be written out: what is added later breaks no script."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"agglo: error: {message}; see {self.prog} --help\n")


def add_command(commands: Any, name: str, *, about: str, details: str, examples: str) -> argparse.ArgumentParser:
    """A command: one line in the list of commands, and a help page of its own."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=details,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_methods(group: Any, default: list[str]) -> None:
    """--method, --linkage, --import."""
    names = " ".join(default)
    group.add_argument("--method", nargs="+", default=default, metavar="M", help=f"by name (default: {names})")
    group.add_argument("--linkage", nargs="+", metavar="L", help="single, average, complete; of atc (default: average)")
    add_import(group)


def add_import(group: Any) -> None:
    """--import, which `main` sees to before the command runs."""
    group.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a Python module first, of this folder or installed, for the methods that it registers",
    )


def add_budget(group: Any, default_text: str, *, threshold: bool = True) -> None:
    """--keep-rate, --threshold, --schedule, of which one may be typed.

    default_text: what is done without any of them.
    """
    budgets = group.add_mutually_exclusive_group()
    budgets.add_argument(
        "--keep-rate",
        nargs="+",
        type=number,
        metavar="R",
        help=f"fraction of patch tokens that stays at each stage (default: {default_text})",
    )
    if threshold:
        budgets.add_argument(
            "--threshold",
            nargs="+",
            type=number,
            metavar="D",
            help="instead: merge while the closest groups are within D, so that images keep as many tokens as they "
            "need",
        )
    budgets.add_argument("--schedule", nargs="+", metavar="S", help=f"instead: {SCHEDULE_HELP}")


def budgets(arguments: argparse.Namespace) -> dict[str, Any]:
    """What add_budget's arguments say, for `variants.variants_of`; empty if they say nothing."""
    typed = {
        "keep_rates": arguments.keep_rate,
        "thresholds": getattr(arguments, "threshold", None),
        "schedules": arguments.schedule,
    }
    return {name: value for name, value in typed.items() if value}


def add_where(group: Any) -> None:
    """--blocks, --features."""
    group.add_argument(
        "--blocks",
        nargs="+",
        type=int,
        metavar="B",
        help="0-based blocks that reduce (default: a quarter, a half and three quarters of the depth)",
    )
    group.add_argument(
        "--features",
        metavar="F",
        help="what atc and tome compare tokens by: keys, keys_per_head, tokens, values (default: keys)",
    )


def add_reduction(parser: argparse.ArgumentParser, methods: list[str], default: str, *, dense: bool) -> None:
    """All that says how tokens are reduced.

    methods: those without --method. default: the budget without one. dense: whether a dense model can be left out.
    """
    group = parser.add_argument_group("reduction")
    add_methods(group, methods)
    add_budget(group, default)
    add_where(group)
    group.add_argument(
        "--proportional",
        choices=["on", "off"],
        help="whether a merged token weighs in attention as much as its members did (default: the method's)",
    )
    group.add_argument(
        "--acts",
        choices=PLACES,
        help="where methods that merge hard act; before a block they spare its attention too, and compare by "
        "--features tokens (default: after attention)",
    )
    group.add_argument(
        "--unread",
        choices=UNREAD,
        help="drop: the last block computes only what a head that reads the class token alone needs (default: keep)",
    )
    group.add_argument(
        "--option",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any other option of a method, for those that have it; a list, such as features=[tokens,keys,keys], has "
        "an entry for each reduction",
    )
    group.add_argument(
        "--tuned",
        nargs="+",
        metavar="T",
        help="what `agglo tune` found, beside all others: its file, or the name of a ready-made result",
    )
    if dense:
        group.add_argument("--no-dense", action="store_true", help="do not evaluate the model without reduction too")
    group.set_defaults(method=None)  # to tell what was typed from what is taken otherwise


def variants(arguments: argparse.Namespace, asked: dict[str, Any], methods: list[str]) -> list[Variant]:
    """What add_reduction's arguments say. asked: `budgets`. methods: those without --method."""
    from agglo.experiments.variants import tuned_variant, variants_of

    typed = variants_of(
        arguments.method or methods,
        **asked,
        linkages=arguments.linkage,
        features=arguments.features,
        blocks=arguments.blocks,
        proportional=None if arguments.proportional is None else arguments.proportional == "on",
        acts=arguments.acts,
        unread=None if arguments.unread == "keep" else arguments.unread,
        options=method_options(arguments.option),
    )
    return typed + [tuned_variant(source) for source in dict.fromkeys(arguments.tuned or [])]


def require_nothing_typed(arguments: argparse.Namespace) -> None:
    """Raise for what says how tokens are reduced where no budget is given: it would be of no effect."""
    if arguments.no_dense and not arguments.tuned:
        raise ValueError(
            "--no-dense leaves nothing to evaluate without one of --keep-rate, --threshold, --schedule and --tuned"
        )
    for option in ("method", "linkage", "features", "blocks", "proportional", "acts", "unread", "option"):
        if getattr(arguments, option):
            raise ValueError(f"--{option} says nothing without one of --keep-rate, --threshold and --schedule")


def add_execution(group: Any, batch_size: int = 64) -> None:
    """--batch-size, --threads, --device, --dtype."""
    group.add_argument("--batch-size", type=positive, default=batch_size, metavar="N", help="(default: %(default)s)")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads of the model (default: torch's)")
    group.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: the best one there is)")
    group.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 (default: %(default)s)")


def device(arguments: argparse.Namespace) -> str:
    """The device that was typed; otherwise the best one there is, and a line that says which."""
    if arguments.device is not None:
        return str(arguments.device)
    from agglo.experiments.devices import best_device

    found = best_device()
    if os.environ.get("RANK", "0") == "0":
        print(f"agglo: running on {found}; --device chooses another", file=sys.stderr)
    return str(found)


def method_options(given: Sequence[str]) -> dict[str, Any]:
    """What --option NAME=VALUE says; values are read as in a method's text (`released=false` is no word but false)."""
    from agglo.methods import option_value

    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"--option {text!r} is not NAME=VALUE")
        options[name] = option_value(value)
    return options


def add_model(
    parser: argparse.ArgumentParser,
    *,
    positional: bool = False,
    default: str | None = "deit_tiny_patch16_224",
    zero_shot: str | None = None,
) -> None:
    """--model or MODEL, and --checkpoint, --pretrained, --image-size, --num-classes.

    default: of --model; None is the model that comes with agglo.
    zero_shot: for --zero-shot, --class-names and --templates, which class names are taken without --class-names.
    """
    group = parser.add_argument_group("model")
    if positional:
        group.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    else:
        group.add_argument(
            "--model", default=default, metavar="NAME", help=f"{MODEL_HELP} (default: {default or 'the one in agglo'})"
        )
    weights = group.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint", type=Path, metavar="F", help="its weights: .safetensors, or a state dict saved by torch"
    )
    weights.add_argument(
        "--pretrained",
        action="store_true",
        help="the published weights (downloads them); folders, hf:, hf-hub: and names with a tag bring theirs",
    )
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
    if zero_shot is not None:
        _add_zero_shot(parser, zero_shot)


def _add_zero_shot(parser: argparse.ArgumentParser, names: str) -> None:
    group = parser.add_argument_group("classes by their names, for models of images and texts (CLIP, SigLIP)")
    group.add_argument(
        "--zero-shot", action="store_true", help="classify by comparing images with a prompt for each class"
    )
    group.add_argument(
        "--class-names",
        metavar="FILE",
        help=f"one name per line, in the order of the labels, or openai: CLIP's own for ImageNet (default: {names})",
    )
    group.add_argument(
        "--templates",
        metavar="FILE",
        help="one prompt per line with {} for the name, several are averaged; or openai: CLIP's 80 for ImageNet "
        "(default: a photo of a {}.)",
    )


def model_spec(arguments: argparse.Namespace) -> ModelSpec:
    """What add_model's arguments say."""
    from agglo.experiments.models import ModelSpec

    size = arguments.image_size
    if size is not None and len(size) > 2:
        raise ValueError(f"--image-size {' '.join(map(str, size))}: one number, or height and width, is accepted")
    from agglo.experiments.zero_shot import read_prompts

    names, templates = getattr(arguments, "class_names", None), getattr(arguments, "templates", None)
    is_zero_shot = getattr(arguments, "zero_shot", False)
    if not is_zero_shot and (names or templates):
        raise ValueError(f"{'--class-names' if names else '--templates'} says nothing without --zero-shot")
    return ModelSpec(
        name=arguments.model,
        checkpoint=arguments.checkpoint,
        pretrained=arguments.pretrained,
        image_size=None if size is None else (size[0], size[-1]),
        num_classes=arguments.num_classes,
        prompts=read_prompts(names, templates) if is_zero_shot else None,
    )


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 too."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def number(text: str) -> float:
    """Any number; what it may be is for the room below to say."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
