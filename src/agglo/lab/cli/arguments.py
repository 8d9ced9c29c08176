"""The parser of commands, and options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from agglo import tuned
from agglo.config import LastBlock, ReductionConfig
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.evaluation.report import TaskMetrics, plot
from agglo.lab.options import (
    FLOPS_HELP,
    IMPORT_HELP,
    SCHEDULE_HELP,
    AtLeastOne,
    ExecutionOptions,
    Whole,
    add_options,
    device_or_best,
    matching,
    option,
    require_plot_name,
)
from agglo.methods.base import PLACES
from agglo.text import parse_options, parse_value

T = TypeVar("T")
USAGE_ERROR, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, and options that must be written out: new ones break no script.

    Args:
        load: Imports the module of a command once the command is typed. It has a docstring, which becomes the
            description, and perhaps EXAMPLES; a dataclass `Options` with `run(options)`, or `add_commands(parser)`.
    """

    def __init__(self, *, load: Callable[[], ModuleType] | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self._load = load

    def parse_known_args(self, *arguments: Any, **keywords: Any) -> Any:
        """Parse as ArgumentParser does; the command's own arguments are added first."""
        if self._load is not None:
            module, self._load = self._load(), None
            self.description = getattr(module, "DESCRIPTION", module.__doc__)
            self.epilog = getattr(module, "EXAMPLES", None)
            if hasattr(module, "add_commands"):
                module.add_commands(self)
            else:
                self.add_run(module.Options, module.run)
        return super().parse_known_args(*arguments, **keywords)

    def add_run(self, options: type[Any], run: Callable[[Any], Any]) -> None:
        """Add the options of a command, and what runs it."""
        add_options(self, options)
        self.set_defaults(run=lambda typed: run(options(**matching(options, typed))))

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"agglo: error: {message}; see {self.prog} --help\n")


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The options that say how tokens are reduced, and what `agglo tune` found beside them."""

    GROUP: ClassVar = "reduction"

    method: Sequence[str] | None = option(None, "by name (default: atc)", metavar="M")
    linkage: Sequence[str] | None = option(None, "single, average, complete; of atc (default: average)", metavar="L")
    imports: Sequence[str] = option([], IMPORT_HELP, flags=("--import",), metavar="MODULE", nargs=None, action="append")
    keep_rate: Sequence[float] | None = option(
        None,
        "fraction of patch tokens that stays at each stage (default: 0.5 to draw, none to evaluate)",
        metavar="R",
        exclusive=True,
    )
    flops: Sequence[float] | None = option(None, f"instead: {FLOPS_HELP}", metavar="F", exclusive=True)
    threshold: Sequence[float] | None = option(
        None,
        "instead: merge while the closest groups are within D, so that images keep as many tokens as they need",
        metavar="D",
        exclusive=True,
    )
    schedule: Sequence[str] | None = option(None, f"instead: {SCHEDULE_HELP}", metavar="S", exclusive=True)
    blocks: Sequence[int] | None = option(
        None, "0-based blocks that reduce (default: a quarter, a half and three quarters of the depth)", metavar="B"
    )
    features: str | None = option(
        None, "what atc and tome compare tokens by: keys, keys_per_head, tokens, values (default: keys)", metavar="F"
    )
    proportional: Literal["on", "off"] | None = option(
        None, "whether a merged token weighs in attention as much as its members did (default: the method's)"
    )
    place: str | None = option(
        None,
        "where methods that merge hard act; before a block they spare its attention too, and compare by --features "
        "tokens (default: after attention)",
        choices=PLACES,
        metavar=None,
    )
    last_block: LastBlock | None = option(
        None,
        "class_token: the last block computes only what a head needs that reads the class token alone (default: all)",
    )
    method_option: Sequence[str] = option(
        [],
        "any other option of a method, for those that have it",
        flags=("--option",),
        metavar="NAME=VALUE",
    )
    tuned: Sequence[str] = option(
        (), "what `agglo tune` found, beside all others: its file, or the name of a ready-made result", metavar="T"
    )

    def has_budget(self) -> bool:
        """Return whether a keep rate, FLOPs, a threshold or a schedule was typed."""
        return bool(self.keep_rate or self.flops or self.threshold or self.schedule)

    def configs(self, keep_rates: Sequence[float] = ()) -> dict[ReductionConfig, str]:
        """Return the configs that are asked for, at these keep rates if nothing else is."""
        typed = configs_of(
            self.method or ["atc"],
            keep_rates=self.keep_rate or (() if self.has_budget() or self.tuned else keep_rates),
            flops=self.flops or (),
            thresholds=self.threshold or (),
            schedules=self.schedule or (),
            linkages=self.linkage,
            features=None if self.features is None else parse_value(self.features),
            blocks=self.blocks,
            proportional=None if self.proportional is None else self.proportional == "on",
            place=self.place,
            last_block=self.last_block,
            **parse_options(self.method_option),
        )
        return typed | {tuned.config(source): f"tuned {Path(source).stem}" for source in self.tuned}


@dataclass(frozen=True, kw_only=True)
class GridOptions(ReductionOptions, ExecutionOptions):
    """The options of `agglo evaluate` and `agglo detect evaluate`."""

    GROUP: ClassVar = "data"

    data: Path = option(help="folder of the data set", metavar="DIR")
    images: AtLeastOne | None = option(None, "only N images, evenly spread (default: all)")
    no_dense: bool = option(False, "do not evaluate the model without reduction too", group=ReductionOptions.GROUP)
    workers: Whole = option(2, "that read images", group=ExecutionOptions.GROUP)
    json: Path | None = option(
        None, "all results, complete after every cell; goes on if there", group="output, besides the tables"
    )
    plot: Path | None = option(
        None, "the result by keep rate and speed, as .png, .svg or .pdf", group="output, besides the tables"
    )

    def settings(self, kind: type[T], **more: Any) -> T:
        """Return the settings of a grid, given its own; raise a ValueError for files that cannot be written."""
        if self.plot is not None:
            require_plot_name(self.plot)
        if not self.has_budget():
            if self.no_dense and not self.tuned:
                budgets = "--keep-rate, --flops, --threshold, --schedule and --tuned"
                raise ValueError(f"--no-dense leaves nothing to evaluate without one of {budgets}")
            for each in fields(ReductionOptions):
                if each.name not in ("imports", "tuned") and getattr(self, each.name):
                    typed = each.name.removeprefix("method_").replace("_", "-")
                    raise ValueError(
                        f"--{typed} says nothing without one of --keep-rate, --flops, --threshold, --schedule"
                    )
        own = {"configs": self.configs(), "dense": not self.no_dense, "device": device_or_best(self.device)}
        return kind(**{**matching(kind, self), **own, **more})

    def tell(self, report: dict[str, Any], text: Callable[[dict[str, Any]], str], task: TaskMetrics) -> None:
        """Print and draw a report; of several processes only the first does."""
        if os.environ.get("RANK", "0") == "0":
            print(text(report))
            if self.plot is not None:
                plot(report, self.plot, task)
