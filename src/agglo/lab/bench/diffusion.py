"""A denoising step of Stable Diffusion 1.5's U-Net: dense, with tomesd, and with agglo's options.

The weights are random (--architecture sd15 is the real architecture, tiny one for trying out), so times are real, but
errors are not those of a trained model: which variant has the smallest depends on how evenly attention spreads, which
--query-gain sets. All contestants take turns: each step of a generation is run by one after the other before the next
step begins. The steps come from a scheduler that the dense model drives; repeats begin at other noise levels. Rows that
keep groupings run every step, and their mean counts, since the first step pays; the others run the first, middle and
last step. The first keep rate is measured with all options, further ones with a choice of them.

Goal: at keep rate 0.5 a step takes no longer than with tomesd.

Prints how long it will take before it begins. With --json every call is kept, and the same command goes on with a run
that was stopped: it runs again, without timing them, the dense steps of the unfinished generation and what rows kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.checks import choice
from agglo.hosts.diffusers.state import generation
from agglo.lab.bench.diffusion_models import (
    ARCHITECTURES,
    DENOISING_STEPS,
    PIXELS,
    QUERY_GAIN,
    Call,
    Trajectory,
    attended_share,
    random_unet,
)
from agglo.lab.bench.diffusion_report import plot, table
from agglo.lab.bench.diffusion_rows import KEPT_STEPS, Contestant, Row, all_rows
from agglo.lab.options import AtLeastOne, option, require_limits, require_plot_name
from agglo.lab.tasks.synthesis.evaluation.errors import relative_errors
from agglo.utils.devices import DTYPES, dtype_named, require_device, torch_threads
from agglo.utils.files import require_output
from agglo.utils.journal import Journal
from agglo.utils.machine import machine
from agglo.utils.progress import progress

EXAMPLES = """\
examples:
  agglo bench diffusion --json diffusion.json
  agglo bench diffusion --architecture tiny --size 64 --window 4 --repeats 2
  agglo bench diffusion --device cuda --dtype float16 --repeats 3 --json diffusion.json --plot diffusion.png
"""

_SAME_MACHINE = ("cpu", "cores", "gpu", "threads", "torch", "diffusers", "tomesd")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to time."""

    architecture: str = option("sd15", choices=tuple(ARCHITECTURES), metavar=None)
    size: AtLeastOne = option(512, "pixels per side")
    batch: AtLeastOne = option(2, "images of a call, those with and without the prompt together")
    keep_rates: Sequence[float] = option((0.5, 0.25), flags=("--keep-rate",), metavar="R")
    steps: AtLeastOne = option(KEPT_STEPS, "successive steps of a generation")
    repeats: AtLeastOne = option(1, "generations, each at a noise level")
    window: AtLeastOne = option(16, "tokens per side of the windows that rows cluster in")
    seed: int = option(0, "of weights and inputs")
    query_gain: float = option(QUERY_GAIN, "multiplies the random queries; 1 makes attention nearly a plain mean")
    threads: AtLeastOne | None = option(None, "CPU threads of torch (default: torch's)")
    device: str = option("cpu", "cpu, cuda, ...", metavar="D")
    dtype: str = option("float32", choices=tuple(DTYPES), metavar=None)
    json: Path | None = option(None, "every call; an unfinished file is gone on with")
    plot: Path | None = option(None, "bars of seconds per step, as .png, .svg or .pdf")

    def __post_init__(self) -> None:
        require_limits(self)
        choice("architecture", self.architecture, ARCHITECTURES)
        multiple = PIXELS * 2 ** (len(ARCHITECTURES[self.architecture]["block_out_channels"]) - 1)
        if self.size < 2 * multiple or self.size % multiple:
            raise ValueError(f"size={self.size} must be a multiple of {multiple} pixels, {2 * multiple} or more")
        if self.batch % 2:
            raise ValueError(f"batch={self.batch} must be even: each image is there with and without its prompt")
        if self.steps > DENOISING_STEPS:
            raise ValueError(f"steps={self.steps} must be between 1 and {DENOISING_STEPS}, those of a generation")
        if not self.query_gain > 0:
            raise ValueError(f"query_gain={self.query_gain} must be above 0")
        if not self.keep_rates or not all(0 < rate <= 1 for rate in self.keep_rates):
            raise ValueError(f"keep_rates={list(self.keep_rates)} must be one or more numbers in (0, 1]")
        if self.plot is not None:
            require_plot_name(self.plot)

    @property
    def side(self) -> int:
        """The side of the latent."""
        return self.size // PIXELS

    def trajectory(self, model: Any, repeat: int) -> Trajectory:
        """Return the steps of a repeat; repeats lie evenly from the begin of a generation to its end."""
        return Trajectory(model, self.batch, self.steps, (2 * repeat + 1) / (2 * self.repeats), self.seed)


def run(options: Options) -> None:
    """Time all rows, print a table and draw the plot."""
    with torch_threads(options.threads):
        record = measure(options)
    print(table(record))
    if options.plot is not None:
        plot(record, options.plot)


def measure(options: Options) -> dict[str, Any]:
    """Return the record: where and what, and the calls of each row. The file holds every call as soon as it ends."""
    device, dtype = require_device(options.device), dtype_named(options.dtype)
    rows = all_rows(options.keep_rates, options.side, options.window)
    journal = _opened(options, rows, device)
    calls = Calls(rows, journal, options.steps, options.repeats)
    if not calls.left():
        return journal.content
    with torch.inference_mode():
        model = random_unet(options.architecture, options.side, options.seed, options.query_gain)
        model.to(device)
        if dtype is not torch.float32:  # diffusers warns of any cast
            model.to(dtype)
        first = next(options.trajectory(model, 0).calls())
        journal.header["attended_share"] = attended_share(model, first)  # the first call of all, which also warms up
        calls.try_out(model, options.batch)
        seconds, _ = Contestant(rows[0], model).run(first)
        print(
            f"agglo: {calls.left()} calls of the model at {seconds:.2g} s or less each: about "
            f"{calls.left() * seconds / 60:.0f} minutes if the machine is idle",
            file=sys.stderr,
        )
        total = len(calls.planned())
        with progress(total, "bench diffusion", start=total - calls.left()) as advance:
            for repeat in range(options.repeats):
                if calls.left(repeat):
                    run_generation(model, options.trajectory(model, repeat), repeat, calls, advance)
    return journal.content


def _opened(options: Options, rows: Sequence[Row], device: torch.device) -> Journal:
    """Open the journal, whose results are the rows with all their calls so far."""
    here = {**machine(device), "diffusers": _version("diffusers"), "tomesd": _version("tomesd")}
    apart = ("threads", "json", "plot")
    settings = {name: value for name, value in asdict(options).items() if name not in apart}
    header = {"machine": here, "settings": settings, "tokens": options.side**2}
    same = ("settings", *(f"machine.{name}" for name in _SAME_MACHINE))
    path = None if options.json is None else require_output(options.json)
    journal = Journal(path, header, same=same, entries="rows")
    for row in rows:
        about = {"by": row.by, "options": dict(row.options), "keeps": row.keeps, "steps": row.steps(options.steps)}
        if row.key not in journal:
            journal.add(row.key, {**about, "cannot": None, "calls": []}, write=False)
    return journal


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Calls:
    """The calls that are to be run, and those that the journal has already. The first row is the dense model."""

    def __init__(self, rows: Sequence[Row], journal: Journal, steps: int, repeats: int) -> None:
        self.rows, self.journal, self.steps, self.repeats = rows, journal, steps, repeats

    def planned(self) -> list[tuple[Row, int, int]]:
        """Return the row, repeat and step of every call that is not known to be impossible."""
        return [
            (row, repeat, step)
            for repeat in range(self.repeats)
            for row in self.rows
            if self.of(row)["cannot"] is None
            for step in row.steps(self.steps)
        ]

    def left(self, repeat: int | None = None) -> int:
        """Return how many are not in the journal."""
        return sum(repeat in (None, one[1]) and not self.is_done(*one) for one in self.planned())

    def of(self, row: Row) -> dict[str, Any]:
        found = self.journal.find(row.key)
        assert found is not None
        return found

    def add(self, row: Row, call: dict[str, Any]) -> None:
        found = self.of(row)
        self.journal.add(row.key, {**found, "calls": [*found["calls"], call]})

    def is_done(self, row: Row, repeat: int, step: int) -> bool:
        return any((call["repeat"], call["step"]) == (repeat, step) for call in self.of(row)["calls"])

    def is_needed(self, row: Row, repeat: int, step: int) -> bool:
        """Return whether a call is to be run: it is not done, or a later one needs the groupings that it keeps."""
        steps = row.steps(self.steps)
        wanted = [one for one in steps if not self.is_done(row, repeat, one)]
        return step in wanted or (row.keeps and step in steps and any(one > step for one in wanted))

    def try_out(self, model: nn.Module, batch: int) -> None:
        """Compile what will be timed, and note what cannot run."""
        for row in self.rows:
            try:
                Contestant(row, model).warm_up(batch)
            except ValueError as error:
                self.of(row)["cannot"] = str(error)


def run_generation(
    model: nn.Module, trajectory: Trajectory, repeat: int, calls: Calls, after: Callable[[str], None]
) -> None:
    """Run step after step, all contestants in turns; call `after` whenever a call is added to the journal.

    One generation is enough for all: what is kept belongs to a model, and each contestant has its own.
    """
    able = [row for row in calls.rows if calls.of(row)["cannot"] is None]
    dense, *others = (Contestant(row, model) for row in able)
    with generation():
        for step, call in enumerate(trajectory.calls()):
            seconds, right = dense.run(call)
            attention = list(dense.attention)
            if not calls.is_done(dense.row, repeat, step):
                _note(calls, dense, call, repeat, step, seconds, after)
            # There and back, so that nobody always runs in the wake of the same other.
            for contestant in others if (repeat + step // 2) % 2 == 0 else reversed(others):
                row = contestant.row
                if not calls.is_needed(row, repeat, step):
                    continue
                seconds, predicted = contestant.run(call)
                if not calls.is_done(row, repeat, step):
                    errors = {
                        "error": _mean_error([predicted], [right]),
                        "attention_error": _mean_error(contestant.attention, attention),
                    }
                    _note(calls, contestant, call, repeat, step, seconds, after, errors)
                contestant.attention.clear()  # at 4096 tokens, 50 MB per contestant
            trajectory.advance(call.timestep, right)


def _mean_error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    pairs = zip(found, right, strict=True)
    return sum(float(relative_errors(ours, dense).mean()) for ours, dense in pairs) / len(right)


def _note(
    calls: Calls,
    contestant: Contestant,
    call: Call,
    repeat: int,
    step: int,
    seconds: float,
    after: Callable[[str], None],
    errors: dict[str, float] | None = None,
) -> None:
    row = contestant.row
    where = {"repeat": repeat, "step": step, "timestep": call.timestep}
    times = {"seconds": seconds, "clustering": contestant.clustering}
    calls.add(row, {**where, **times, **(errors or {})})
    budget = "" if row.keep_rate is None else f" keep {row.keep_rate:g}"
    after(f"timestep {call.timestep}: {row.name}{budget}: {seconds:.2f} s")
