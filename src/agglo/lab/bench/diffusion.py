"""A denoising step of Stable Diffusion 1.5's U-Net: dense, with tomesd, and with agglo's options.

Weights are random: times are those of the architecture. Each step of a generation is run by all contenders before the
next step begins. Rows that keep groupings count by their mean over the steps, since the first step pays. The first keep
rate is measured with all options, further ones with a choice of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from statistics import mean, median
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F

from agglo import patch
from agglo.config import ReductionConfig
from agglo.hosts.diffusers.state import asked_for, generation
from agglo.lab.bench import PartClock, TimingOptions, conclude, in_turns, page
from agglo.lab.options import AtLeastOne, option
from agglo.utils.devices import DTYPES, dtype_named, require_device, torch_threads
from agglo.utils.machine import machine, version
from agglo.utils.tables import CANNOT, Column, Table
from agglo.utils.timing import stopwatch

EXAMPLES = """\
examples:
  agglo bench diffusion --json diffusion.json
  agglo bench diffusion --architecture tiny --size 64 --repeats 2
  agglo bench diffusion --device cuda --dtype float16 --repeats 3 --json diffusion.json
"""

DENSE, TOMESD = "dense", "tomesd"
PIXELS = 8  # of the image, per side of a latent's element
TEXT_TOKENS = 77
STEPS = 5  # of a generation; groupings are kept for as many
_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768},  # the rest are the defaults of diffusers
    "tiny": {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "norm_num_groups": 8,
    },
}
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    architecture: Literal["sd15", "tiny"] = "sd15"
    size: AtLeastOne = option(512, "pixels per side, a multiple of 64")
    batch: AtLeastOne = option(2, "images of a call, those with and without the prompt together")
    keep_rates: Sequence[float] = option((0.5, 0.25), flags=("--keep-rate",), metavar="R")
    repeats: AtLeastOne = option(1, f"generations of {STEPS} steps")
    device: str = option("cpu", "cpu, cuda, ...", metavar="D")
    dtype: str = option("float32", choices=tuple(DTYPES), metavar=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 64:
            raise ValueError(f"size={self.size} must be a multiple of 64 pixels")


def contenders(keep_rates: Sequence[float], side: int) -> list[Record]:
    """Return the dense model, every option at the first keep rate, and those that matter most at further ones."""
    window = side // 4
    kept, windows = f"kept for {STEPS} steps", f"windows of {window}"
    found: list[tuple[str, float | None, dict[str, Any]]] = [(DENSE, None, {})]
    for keep_rate in dict.fromkeys(keep_rates):
        ratio = {"ratio": round(1 - keep_rate, 9)}
        found.append((TOMESD, keep_rate, ratio))
        if asked_for(side * side, keep_rate) <= (side // 2) ** 2:  # where cells of 2 x 2 can do no more
            found.append((f"{TOMESD}, cells of 4 x 4", keep_rate, {**ratio, "sx": 4, "sy": 4}))
        ours: dict[str, dict[str, Any]] = {
            "atc, paper": {"features": "tokens", "proportional": False},
            "atc": {},
            f"atc, {kept}": {"every": STEPS},
            f"atc, {windows}": {"window": window},
            f"atc, {windows}, {kept}": {"window": window, "every": STEPS},
        }
        if keep_rate == keep_rates[0]:
            ours |= {
                "agglo's tomesd": {"method": "tomesd"},
                "atc, shared by the blocks": {"share": "resolution"},
                f"atc, {windows}, by need": {"window": window, "spread": "need"},
                "atc, neighbours only": {"connectivity": "grid"},
            }
        found += [(name, keep_rate, options) for name, options in ours.items()]
    # keeps: whether steps differ in cost, since groupings are kept.
    return [{"name": n, "keep_rate": rate, "options": own, "keeps": "every" in own} for n, rate, own in found]


def prepared(model: Any, row: Record, clock: PartClock) -> Any:
    """Return a copy of the model that shares its weights, reduced as a row says; ValueError if that is impossible."""
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    if row["name"].startswith(TOMESD):
        _apply_tomesd(copied, row["keep_rate"], row["options"])
    elif row["keep_rate"] is not None:
        patch.apply(copied, ReductionConfig.of(**{"keep_rate": row["keep_rate"], **row["options"]}))
        method = copied.agglo_applied.method
        vars(method)["reduce"] = clock.timed(method.reduce, "clustering")
    return copied


def _apply_tomesd(model: Any, keep_rate: float, options: Mapping[str, Any]) -> None:
    """Apply tomesd; ValueError where it would silently merge fewer tokens than it is asked to."""
    if find_spec("tomesd") is None:
        raise ValueError("tomesd is not installed")
    import tomesd

    side, cell = model.config.sample_size, options.get("sx", 2)
    target, fewest = asked_for(side * side, keep_rate), (side // cell) ** 2
    if target < fewest:
        raise ValueError(
            f"tomesd cannot go from {side} x {side} tokens to {target}: one stays in each cell of {cell} x {cell}, "
            f"{fewest} in all"
        )
    tomesd.apply_patch(model, **options)


def random_unet(architecture: str, side: int) -> Any:
    """Build a U-Net with random weights for latents of side x side."""
    from diffusers import UNet2DConditionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet2DConditionModel(sample_size=side, **ARCHITECTURES[architecture]).eval().requires_grad_(False)


def run(options: Options) -> None:
    """Time all contenders, print a table and write the record."""
    with torch_threads(options.threads):
        record = measure(options)
    conclude(record, describe(record), options.json)


@torch.inference_mode()
def measure(options: Options) -> Record:
    """Time all contenders; return where and what ran, and the calls of each row."""
    from diffusers import DDIMScheduler

    device, dtype, side = require_device(options.device), dtype_named(options.dtype), options.size // PIXELS
    versions = {name: version(name) for name in ("diffusers", "tomesd")}
    header = {"machine": {**machine(device), **versions}, "settings": options.settings(), "tokens": side**2}
    model, clock = random_unet(options.architecture, side).to(device), PartClock(device)
    if dtype is not torch.float32:  # diffusers warns of any cast
        model.to(dtype)
    drawing = torch.Generator().manual_seed(0)
    coarse = torch.randn(options.batch, 4, side // 4, side // 4, generator=drawing)
    clean = F.interpolate(coarse, size=(side, side), mode="bicubic")
    noise = torch.randn(clean.shape, generator=drawing)
    text = torch.randn(options.batch, TEXT_TOKENS, model.config.cross_attention_dim, generator=drawing)
    text = text.to(device, dtype)
    n_calls = options.repeats * STEPS
    timesteps = torch.linspace(980, 20, n_calls).long()
    samples = DDIMScheduler(**_NOISE).add_noise(*(x.expand(n_calls, *x.shape) for x in (clean, noise)), timesteps)

    def call(reduced: Any, turn: int) -> Record:
        clock.clear()
        timestep = int(timesteps[turn])
        with stopwatch(device) as taken:  # by position: tomesd's hook looks for the sample there
            reduced(samples[turn].to(device, dtype), timestep, encoder_hidden_states=text)
        about = {"repeat": turn // STEPS, "step": turn % STEPS, "timestep": timestep}
        return {**about, "seconds": taken.seconds, "clustering": clock.get("clustering", 0.0)}

    rows = [{**row, "cannot": None, "calls": []} for row in contenders(options.keep_rates, side)]
    models = []
    for row in rows:
        try:
            reduced = prepared(model, row, clock)
            with generation():
                call(reduced, 0)  # compiles kernels
            models.append(reduced)
        except ValueError as error:
            row["cannot"] = str(error)
    with ExitStack() as stack:
        if find_spec("tomesd") is not None:  # its matching is a function of its module
            from tomesd import merge

            name = "bipartite_soft_matching_random2d"
            stack.enter_context(mock.patch.object(merge, name, clock.timed(getattr(merge, name), "clustering")))
        stack.enter_context(generation())  # one for all: after STEPS of them kept groupings are too old
        calls = in_turns("diffusion", models, call, n_calls, warm_up=0)
    for row, own in zip((row for row in rows if row["cannot"] is None), calls, strict=True):
        row["calls"] = own
    return {**header, "rows": rows}


_COLUMNS = {
    "keep_rate": Column("keep", "g", left=True),
    "name": Column("variant", left=True),
    "seconds": Column("s per step", ".2f"),
    "least": Column("least", ".2f"),
    "most": Column("most", ".2f"),
    "to_dense": Column("to dense", ".3f"),
    "to_tomesd": Column("to tomesd", ".3f"),
    "clustering": Column("clustering, s", ".2f"),
}


def summaries(record: Record) -> list[Record]:
    """Return the numbers of each row, by the names of the table's columns; without those that make no sense."""
    dense = next(row for row in record["rows"] if row["name"] == DENSE)
    tomesd = {row["keep_rate"]: row for row in record["rows"] if row["name"] == TOMESD and row["calls"]}
    found = []
    for row in record["rows"]:
        if row["keep_rate"] is None and row is not dense:  # in records of old
            continue
        one: Record = {"name": row["name"], "keep_rate": row["keep_rate"], "seconds": CANNOT}
        if row["calls"]:
            seconds = [call["seconds"] for call in row["calls"]]
            one |= {"seconds": _per_step(row, "seconds"), "least": min(seconds), "most": max(seconds)}
            one["to_dense"] = _ratio(row, dense)
            if row["keep_rate"] in tomesd:
                one["to_tomesd"] = _ratio(row, tomesd[row["keep_rate"]])
            if row["keep_rate"] is not None:
                one["clustering"] = _per_step(row, "clustering")
        found.append(one)
    return found


def _per_step(row: Record, what: str) -> float:
    """Return the median; where steps differ in cost, the median over generations of their means."""
    return median(_by_turn(row, what, per_generation=row["keeps"]).values())


def _ratio(row: Record, other: Record) -> float:
    """Return the median of the ratios within each step, or within each generation where steps differ in cost."""
    per_generation = row["keeps"] or other["keeps"]
    ours, theirs = (_by_turn(one, "seconds", per_generation) for one in (row, other))
    return median(ours[turn] / theirs[turn] for turn in ours if turn in theirs)


def _by_turn(row: Record, what: str, per_generation: bool) -> dict[tuple[int, ...], float]:
    if not per_generation:
        return {(call["repeat"], call["step"]): call[what] for call in row["calls"]}
    groups = groupby(row["calls"], key=lambda call: call["repeat"])
    return {(repeat,): mean(call[what] for call in calls) for repeat, calls in groups}


def describe(record: Record) -> str:
    chosen, found = record["settings"], record["machine"]
    timesteps = [call["timestep"] for row in record["rows"] if row["name"] == DENSE for call in row["calls"]]
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "diffusers", "tomesd") if found[name])
    what = (
        f"{chosen['architecture']}, random weights, {chosen['size']} x {chosen['size']} pixels ({record['tokens']} "
        f"tokens), batch {chosen['batch']}, {chosen['dtype']}, timesteps {', '.join(map(str, timesteps))}; {versions}"
    )
    table = Table(list(_COLUMNS.values()), [[row.get(name) for name in _COLUMNS] for row in summaries(record)])
    return page(record, what, table, *not_run(record))


def not_run(record: Record) -> list[str]:
    rows = [row for row in record["rows"] if row["cannot"]]
    return [f"not run: {row['name']} at keep {row['keep_rate']:g}: {row['cannot']}" for row in rows]
