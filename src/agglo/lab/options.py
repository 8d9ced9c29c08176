"""Options of commands as fields of dataclasses: type, limits, default and help are declared once.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        epochs: AtLeastOne = option(30, "passes over the training images")

`add_options` adds the fields to a parser of argparse, and `matching` finds what was typed for them.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from agglo.embedded import classifier as embedded
from agglo.models.libraries.base import ModelSpec
from agglo.models.zero_shot import read_prompts
from agglo.schedule import EXAMPLES
from agglo.utils.devices import best_device
from agglo.utils.files import require_output

EMBEDDED = ModelSpec(embedded.NAME, pretrained=True)  # the classifier that comes with agglo

# Numbers with the least and the most that they may be.
AtLeastOne = Annotated[int, (1, math.inf)]
Whole = Annotated[int, (0, math.inf)]
Amount = Annotated[float, (0, math.inf)]
Fraction = Annotated[float, (0, 1)]

IMPORT_HELP = "import a Python module first, for the methods, hosts and data sets that it registers"
FLOPS_HELP = "fraction of the dense model's FLOPs that is left, by the recipe that agglo.recipe returns"
SCHEDULE_HELP = f"a schedule, such as {EXAMPLES} (docs/evaluate.md lists all)"
_METAVARS = {int: "N", float: "X", Path: "F", str: "NAME"}


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """Return a field of a dataclass that is an option of a command.

    Args:
        default: Its value where nothing is typed; without one the option is required.
        help: One sentence for the help page, which gets the default appended unless it names one.
        more: Arguments of `ArgumentParser.add_argument` in place of those that follow from the type. Besides them:
            flags, in place of the field's name; positional=True; group, the title above it on the help page;
            exclusive=True, if only one of those of its group may be typed, or exclusive="required", if one must.
    """
    metadata = {"help": help, **more}
    if isinstance(default, list | dict):
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def help_texts(settings: type[Any]) -> dict[str, str]:
    """Return the help of each option; one that only changes a default has the help of the base class."""
    return {each.name: text for each in fields(settings) if (text := _metadata(settings, each.name)["help"])}


def require_limits(settings: Any) -> None:
    """Raise ValueError for the first value outside of the limits of its type."""
    for name, hint in _hints(type(settings)).items():
        value = getattr(settings, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{name}={value!r} is not one of {', '.join(get_args(hint))}")
        for base in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
            if get_origin(base) is Annotated and value is not None:
                least, most = base.__metadata__[0]
                if not least <= value <= most:
                    within = "in " if most < math.inf else ""
                    raise ValueError(f"{name}={value!r} must be {within}{_accepted(least, most)}")


def add_options(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """Add the fields of a dataclass to a parser.

    A class's GROUP is the title above the options that it declares.
    """
    hints = _hints(settings)
    groups: dict[tuple[str | None, bool], Any] = {(None, False): parser}
    for each in fields(settings):
        more = _metadata(settings, each.name)
        title = more.pop("group")
        if (title, False) not in groups:
            groups[title, False] = parser.add_argument_group(title)
        exclusive = more.pop("exclusive", False)
        if exclusive and (title, True) not in groups:
            required = exclusive == "required"
            groups[title, True] = groups[title, False].add_mutually_exclusive_group(required=required)
        flags, keywords = _argument(each, hints[each.name], more)
        groups[title, bool(exclusive)].add_argument(*flags, **keywords)


def matching(settings: type[Any], values: Any) -> dict[str, Any]:
    """Return the attributes of an object that have the names of a dataclass's fields."""
    return {each.name: getattr(values, each.name) for each in fields(settings) if hasattr(values, each.name)}


def _hints(settings: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(settings, include_extras=True)
    return {each.name: hints[each.name] for each in fields(settings)}


def _metadata(settings: type[Any], name: str) -> dict[str, Any]:
    """Return the metadata and the group of a field, from the base class where a class only changes the default."""
    bases = [base for base in settings.__mro__ if name in inspect.get_annotations(base)]
    declared = [(base.__dict__["__dataclass_fields__"][name].metadata, base) for base in bases]
    found, base = next((each for each in declared if each[0]), declared[0])
    return {"help": "", "group": base.__dict__.get("GROUP"), **found}


def _argument(each: Field[Any], hint: Any, more: dict[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
    """Return the flags and keywords of `ArgumentParser.add_argument` for a field."""
    default = each.default if each.default_factory is MISSING else each.default_factory()
    is_required = default is MISSING
    keywords: dict[str, Any] = {"default": None if is_required else default, **_of_type(hint, default)}
    flags: Sequence[str] = more.pop("flags", None) or (f"--{each.name.replace('_', '-')}",)
    if more.pop("positional", False):
        flags = (each.name,)
        keywords |= {} if is_required else {"nargs": "?"}
    else:
        keywords |= {"dest": each.name, "required": is_required}
    keywords |= more
    if not is_required and "(default:" not in keywords["help"]:
        keywords["help"] += _shown(default, keywords)
    keywords["help"] = keywords["help"].strip().replace("%", "%%")
    return flags, {name: value for name, value in keywords.items() if value is not None or name == "default"}


def _shown(default: Any, keywords: dict[str, Any]) -> str:
    """Return the default for the help page; empty where there is none."""
    if default is None or default in ((), [], {}) or keywords.get("action") == "store_true":
        return ""
    values = default if isinstance(default, list | tuple) else [default]
    return f" (default: {' '.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)})"


def _of_type(hint: Any, default: Any) -> dict[str, Any]:
    """Return the keywords of `ArgumentParser.add_argument` that follow from a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        [hint] = (each for each in inner if each is not NoneType)
        return _of_type(hint, default)
    if origin is Literal:
        return {"choices": inner}
    if origin is tuple:
        return {**_of_type(inner[0], None), "nargs": len(inner)}
    if origin is not None and origin is not Annotated:  # a list or a sequence
        return {**_of_type(inner[0], None), "nargs": "+", **({"action": "extend"} if default == [] else {})}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction if default is True else "store_true"}
    base, limits = (inner[0], hint.__metadata__[0]) if origin is Annotated else (hint, (-math.inf, math.inf))
    parse: Callable[[str], Any] = partial(_number, base, *limits) if base in (int, float) else base
    return {"type": parse, "metavar": _METAVARS.get(base)}


def _accepted(least: float, most: float) -> str:
    return f"{least} to {most}" if most < math.inf else f"at least {least}"


def _number(kind: type[int] | type[float], least: float, most: float, text: str) -> float:
    what = "whole number" if kind is int else "number"
    with suppress(ValueError):
        if least <= (value := kind(text)) <= most:
            return value
    limits = "" if least == -math.inf else f" of {_accepted(least, most)}"
    raise argparse.ArgumentTypeError(f"{text!r} is not a {what}{limits}")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that say which model, with which weights."""

    GROUP: ClassVar = "model"
    MODEL_HELP: ClassVar = "a timm name, hf:PATH, torchvision:NAME, open_clip:NAME, ... (docs/evaluate.md#models)"

    model: Any = option("deit_tiny_patch16_224", MODEL_HELP, type=str, metavar="NAME")
    checkpoint: Path | None = option(None, "its weights: .safetensors, or a state dict saved by torch", exclusive=True)
    pretrained: bool = option(
        False,
        "the published weights (downloads them); folders, hf:, hf-hub: and names with a tag bring theirs",
        exclusive=True,
    )
    image_size: Sequence[AtLeastOne] | None = option(
        None, "pixels: one number, or height and width (default: the model's own)"
    )
    num_classes: AtLeastOne | None = option(
        None, "classes of the head (default: the checkpoint's, or else the model's)"
    )

    def spec(self) -> ModelSpec:
        """Return the model: the embedded classifier, which takes no other option, if none was typed."""
        if self.model is None:
            for each in fields(ZeroShotOptions):
                if getattr(self, each.name, None):
                    raise ValueError(f"--{each.name.replace('_', '-')} says nothing without --model")
            return EMBEDDED
        size = self.image_size
        if size is not None and len(size) > 2:
            raise ValueError(f"--image-size {' '.join(map(str, size))}: one number, or height and width, is accepted")
        return ModelSpec(
            name=self.model,
            checkpoint=self.checkpoint,
            pretrained=self.pretrained,
            image_size=None if size is None else (size[0], size[-1]),
            num_classes=self.num_classes,
        )

    def trained_spec(self) -> ModelSpec:
        """Return the model, and warn if its weights are random."""
        spec = self.spec()
        if spec.has_random_weights:
            notice = "weights are random, and so are the results; give --checkpoint or --pretrained"
            print(f"agglo: {notice}", file=sys.stderr)
        return spec


@dataclass(frozen=True, kw_only=True)
class ZeroShotOptions(ModelOptions):
    """The options that say which model, which may classify by prompts."""

    GROUP: ClassVar = "classes by their names, for models of images and texts (CLIP, SigLIP)"

    zero_shot: bool = option(False, "classify by comparing images with a prompt for each class")
    class_names: str | None = option(
        None,
        "one name per line, in the order of the labels, or openai: CLIP's own for ImageNet (default: the data set's, "
        "or ImageNet's 1000)",
        metavar="FILE",
    )
    templates: str | None = option(
        None,
        "one prompt per line with {} for the name, several are averaged; or openai: CLIP's 80 for ImageNet (default: a "
        "photo of a {}.)",
        metavar="FILE",
    )

    def spec(self) -> ModelSpec:
        """Return the model, with its prompts."""
        spec = super().spec()
        if self.zero_shot:
            return replace(spec, prompts=read_prompts(self.class_names, self.templates))
        if self.class_names or self.templates:
            typed = "--class-names" if self.class_names else "--templates"
            raise ValueError(f"{typed} says nothing without --zero-shot")
        return spec


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The options that say on what a model runs."""

    GROUP: ClassVar = "how it runs"

    threads: AtLeastOne | None = option(None, "CPU threads of the model (default: torch's)")
    device: str | None = option(None, "cpu, cuda, cuda:1, mps, xpu (default: the best one there is)", metavar="D")


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions(DeviceOptions):
    """The options that say where and how a model runs."""

    batch_size: AtLeastOne = option(64)
    dtype: str = option("float32", "float32, bfloat16, float16", metavar="DTYPE")


def require_plot_name(path: Path) -> Path:
    """Return the path, if a plot can be written there; checked before any work is done."""
    from matplotlib.backend_bases import FigureCanvasBase

    accepted = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in accepted:
        raise ValueError(f"plot={str(path)!r} has no known ending; accepted: {', '.join(accepted)}")
    return require_output(path)


def device_or_best(device: str | None) -> str:
    """Return the device that was typed; otherwise the best one there is, which is printed."""
    if device is not None:
        return device
    found = best_device()
    if os.environ.get("RANK", "0") == "0":
        print(f"agglo: running on {found}; --device chooses another", file=sys.stderr)
    return str(found)
