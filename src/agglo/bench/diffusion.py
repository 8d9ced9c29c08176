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

examples:
  agglo bench diffusion --json diffusion.json
  agglo bench diffusion --architecture tiny --size 64 --window 4 --repeats 2
  agglo bench diffusion --device cuda --dtype float16 --repeats 3 --json diffusion.json --plot diffusion.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from agglo.bench.diffusion_models import (
    ARCHITECTURES,
    DENOISING_STEPS,
    PIXELS,
    QUERY_GAIN,
    Trajectory,
    attended_share,
    random_unet,
)
from agglo.bench.diffusion_report import plot, table
from agglo.bench.diffusion_rows import KEPT_STEPS, Contestant, Row, all_rows
from agglo.bench.diffusion_turns import Calls, run_generation
from agglo.bench.model_report import require_plot_name
from agglo.experiments.devices import DTYPES, dtype_named, require_device, torch_threads
from agglo.experiments.files import require_output, write_json
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress

_SAME_MACHINE = ("cpu", "cores", "gpu", "threads", "torch", "diffusers", "tomesd")


@dataclass(frozen=True)
class DiffusionSettings:
    """size: of the picture, in pixels per side. batch: pictures with and without the prompt together. steps:
    successive ones of each generation. window: of the rows that cluster in windows, in tokens per side."""

    architecture: str = "sd15"
    size: int = 512
    batch: int = 2
    keep_rates: Sequence[float] = (0.5, 0.25)
    steps: int = KEPT_STEPS
    repeats: int = 1
    window: int = 16
    seed: int = 0
    query_gain: float = QUERY_GAIN
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture={self.architecture!r} is not known; accepted: {', '.join(ARCHITECTURES)}")
        multiple = PIXELS * 2 ** (len(ARCHITECTURES[self.architecture]["block_out_channels"]) - 1)
        if self.size < 2 * multiple or self.size % multiple:
            raise ValueError(f"size={self.size} must be a multiple of {multiple} pixels, {2 * multiple} or more")
        if self.batch < 2 or self.batch % 2:
            raise ValueError(f"batch={self.batch} must be even: each picture is there with and without its prompt")
        if not 1 <= self.steps <= DENOISING_STEPS:
            raise ValueError(f"steps={self.steps} must be between 1 and {DENOISING_STEPS}, those of a generation")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")
        if not self.query_gain > 0:
            raise ValueError(f"query_gain={self.query_gain} must be above 0")
        if not self.keep_rates or not all(0 < rate <= 1 for rate in self.keep_rates):
            raise ValueError(f"keep_rates={list(self.keep_rates)} must be one or more numbers in (0, 1]")

    @property
    def side(self) -> int:
        """Of the latent."""
        return self.size // PIXELS

    def part(self, repeat: int) -> float:
        """Where in a generation the steps of a repeat lie: evenly from its begin to its end."""
        return (2 * repeat + 1) / (2 * self.repeats)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = DiffusionSettings()
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=defaults.architecture)
    parser.add_argument("--size", type=int, default=defaults.size, help="pixels per side (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="of a call (default: %(default)s)")
    parser.add_argument("--keep-rate", type=float, nargs="+", default=list(defaults.keep_rates), metavar="R")
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="successive steps of a generation (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=defaults.repeats,
        help="generations, each at a noise level (default: %(default)s)",
    )
    parser.add_argument("--window", type=int, default=defaults.window, help="tokens per side (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of weights and inputs (default: %(default)s)")
    parser.add_argument(
        "--query-gain",
        type=float,
        default=defaults.query_gain,
        metavar="G",
        help="multiplies the random queries; 1 makes attention nearly a plain mean (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="of torch; as it is by default")
    parser.add_argument("--device", default=defaults.device, help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--json", type=Path, metavar="F", help="every call; an unfinished file is gone on with")
    parser.add_argument("--plot", type=Path, metavar="F", help="bars of seconds per step, as .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> None:
    settings = DiffusionSettings(
        architecture=arguments.architecture,
        size=arguments.size,
        batch=arguments.batch,
        keep_rates=arguments.keep_rate,
        steps=arguments.steps,
        repeats=arguments.repeats,
        window=arguments.window,
        seed=arguments.seed,
        query_gain=arguments.query_gain,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    if arguments.plot is not None:
        require_plot_name(arguments.plot)
    with torch_threads(arguments.threads):
        record = measure(settings, arguments.json)
    print(table(record))
    if arguments.plot is not None:
        plot(record, arguments.plot)


def measure(settings: DiffusionSettings, path: Path | None = None) -> dict[str, Any]:
    """The record: where and what, and of each row its calls. Kept in a file after every call, and gone on with."""
    device, dtype = require_device(settings.device), dtype_named(settings.dtype)
    rows = all_rows(settings.keep_rates, settings.side, settings.window)
    record = _begun(settings, rows, device, path)
    calls = Calls(rows, record, settings.steps, settings.repeats)
    if not calls.left():
        return record
    with torch.inference_mode():
        model = random_unet(settings.architecture, settings.side, settings.seed, settings.query_gain)
        model.to(device)
        if dtype is not torch.float32:  # diffusers warns of any cast
            model.to(dtype)

        def trajectory(repeat: int) -> Trajectory:
            return Trajectory(model, settings.batch, settings.steps, settings.part(repeat), settings.seed)

        first = next(trajectory(0).calls())
        record["attended_share"] = attended_share(model, first)  # the first call of all, which also warms up
        calls.try_out(model, settings.batch)
        seconds, _ = Contestant(rows[0], model).run(first)
        _say_how_long(seconds, calls.left(), path)
        total = len(calls.planned())
        with progress(total, "bench diffusion", start=total - calls.left()) as advance:

            def after(note: str) -> None:
                if path is not None:
                    write_json(path, record)
                advance(note)

            for repeat in range(settings.repeats):
                if calls.left(repeat):
                    run_generation(model, trajectory(repeat), repeat, calls, after)
    return record


def _begun(settings: DiffusionSettings, rows: Sequence[Row], device: torch.device, path: Path | None) -> dict[str, Any]:
    """The record of an unfinished run, if the file holds one of the same settings and machine; otherwise a new one."""
    here = {**machine(device), "diffusers": _version("diffusers"), "tomesd": _version("tomesd")}
    chosen = {**asdict(settings), "keep_rates": list(settings.keep_rates)}
    if path is not None and require_output(path).exists():
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        there = record.get("machine", {})
        wrong = [name for name in chosen if record.get("settings", {}).get(name) != chosen[name]]
        wrong += [name for name in _SAME_MACHINE if there.get(name) != here[name]]
        if wrong:
            raise ValueError(f"json={str(path)!r} holds a run with another {', '.join(wrong)}: give another name")
        return record
    described: list[dict[str, Any]] = [
        {"name": row.name, "keep_rate": row.keep_rate, "by": row.by, "options": dict(row.options)}
        | {"keeps": row.keeps, "steps": row.steps(settings.steps), "cannot": None, "calls": []}
        for row in rows
    ]
    return {"machine": here, "settings": chosen, "tokens": settings.side**2, "attended_share": None, "rows": described}


def _say_how_long(seconds: float, calls: int, path: Path | None) -> None:
    kept = "" if path is None else ", and can be stopped and gone on with"
    print(
        f"agglo: {calls} calls of the model at {seconds:.2g} s or less each: about {calls * seconds / 60:.0f} minutes "
        f"if the machine is idle{kept}",
        file=sys.stderr,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
