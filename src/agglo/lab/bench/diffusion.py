"""A denoising step of U-Nets and of the embedded generator: dense, with tomesd, and with agglo's options.

Weights of the U-Nets are random: times are those of the architecture. Those of the embedded generator are trained, and
the error of its prediction stands beside the time. Each step of a generation is run by all contenders before the next
step begins. Rows that keep groupings count by their mean over the steps, since the first step pays. The first keep rate
is measured with all options, further ones and Stable Diffusion's whole U-Net with a choice of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from statistics import mean, median
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from agglo import patch
from agglo.checks import choice
from agglo.config import ReductionConfig
from agglo.embedded import generator
from agglo.hosts.diffusers.state import WINDOW, asked_for, generation
from agglo.lab.bench import PartClock, TimingOptions, conclude, in_turns, page
from agglo.lab.options import AtLeastOne, option
from agglo.methods.atc import ALL
from agglo.tuning.subject import distances
from agglo.utils.devices import DTYPES, dtype_named, require_device, torch_threads
from agglo.utils.machine import machine, version
from agglo.utils.tables import CANNOT, Column, Table
from agglo.utils.timing import stopwatch

EXAMPLES = """\
examples:
  agglo bench diffusion --json diffusion.json
  agglo bench diffusion --architecture embedded --keep-rate 0.7 0.5
  agglo bench diffusion --architecture tiny --size 64 --repeats 2
  agglo bench diffusion --device cuda --dtype float16 --repeats 3 --json diffusion.json
"""

DENSE, TOMESD, OWN_TOMESD = "dense", "tomesd", "agglo's tomesd"
PIXELS = 8  # of the image, per side of a latent's element
TEXT_TOKENS = 77
STEPS = 5  # of a generation; groupings are kept for as many
GENERATED = 4  # times as many generations where a step takes milliseconds
_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SD15, EMBEDDED = "sd15", "embedded"
ARCHITECTURES: dict[str, dict[str, Any]] = {  # of U-Nets: what is not diffusers' default
    SD15: {"cross_attention_dim": 768},
    # Stable Diffusion's widths at the two finest resolutions, with one layer each, and a U-Net of few channels.
    "sd15-one-layer": {
        "block_out_channels": (320, 640),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D",) * 2,
        "up_block_types": ("CrossAttnUpBlock2D",) * 2,
        "cross_attention_dim": 768,
    },
    "narrow": {"block_out_channels": (96, 192, 320, 320), "layers_per_block": 1, "cross_attention_dim": 768},
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

    architecture: Sequence[str] = option((SD15,), "one table each", choices=(*ARCHITECTURES, EMBEDDED), metavar=None)
    size: AtLeastOne = option(512, "pixels per side, a multiple of 64; the embedded generator has its own")
    batch: AtLeastOne = option(2, "images of a U-Net's call, those with and without the prompt together")
    keep_rates: Sequence[float] = option((0.5, 0.25), flags=("--keep-rate",), metavar="R")
    repeats: AtLeastOne = option(
        1, f"generations of {STEPS} steps; the embedded generator makes {GENERATED} times as many"
    )
    device: str = option("cpu", "cpu, cuda, ...", metavar="D")
    dtype: str = option("float32", choices=tuple(DTYPES), metavar=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for architecture in self.architecture:
            choice("architecture", architecture, (*ARCHITECTURES, EMBEDDED))
        if self.size % 64:
            raise ValueError(f"size={self.size} must be a multiple of 64 pixels")


def contenders(architecture: str, keep_rates: Sequence[float], side: int) -> list[Record]:
    """Return the dense model, every option at the first keep rate, and those that matter most at further ones."""
    window = WINDOW if side > WINDOW else side // 2
    found: list[tuple[str, float | None, dict[str, Any]]] = [(DENSE, None, {})]
    for keep_rate in dict.fromkeys(keep_rates):
        ours: dict[str, dict[str, Any]] = {}
        is_first, is_short = keep_rate == keep_rates[0], architecture == SD15
        if architecture != EMBEDDED:  # tomesd takes its tokens for those of a coarser resolution, and merges none
            ours[TOMESD] = {"ratio": round(1 - keep_rate, 9)}
            if asked_for(side * side, keep_rate) <= (side // 2) ** 2:  # where cells of 2 x 2 can do no more
                ours[f"{TOMESD}, cells of 4 x 4"] = {**ours[TOMESD], "sx": 4, "sy": 4}
        if architecture == EMBEDDED or (is_first and not is_short):
            ours[OWN_TOMESD] = {"method": "tomesd"}
        ours |= {"atc": {}, f"atc, kept for {STEPS} steps": {"every": STEPS}}
        if is_first and side > WINDOW:
            ours["atc, all tokens at once"] = {"window": ALL}
        elif is_first:  # which is the default there
            ours[f"atc, windows of {window}"] = {"window": window}
        if is_first and not is_short:
            ours |= {
                "atc, paper": {"features": "tokens", "proportional": False, "window": ALL},
                f"atc, windows of {window}, by need": {"window": window, "spread": "need"},
                "atc, neighbours only": {"connectivity": "grid"},
                "atc, shared by the blocks": {"share": "resolution"},
            }
        found += [(name, keep_rate, options) for name, options in ours.items()]
    # keeps: whether steps differ in cost, since groupings are kept.
    return [{"name": n, "keep_rate": rate, "options": own, "keeps": "every" in own} for n, rate, own in found]


def prepared(model: Any, row: Record, clock: PartClock) -> Any:
    """Return a copy of the model that shares its weights, reduced as a row says; ValueError if that is impossible."""
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    if "ratio" in row["options"]:
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


class Subject(NamedTuple):
    """A model, and what it is called with at each step of all generations, as positional and named arguments."""

    model: Any
    side: int  # of the grid of its tokens
    images: int
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]


def random_unet(architecture: str, side: int) -> Any:
    """Build a U-Net with random weights for latents of side x side."""
    from diffusers import UNet2DConditionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet2DConditionModel(sample_size=side, **ARCHITECTURES[architecture]).eval().requires_grad_(False)


def _unet(architecture: str, options: Options) -> Subject:
    side = options.size // PIXELS
    model, drawing = random_unet(architecture, side), torch.Generator().manual_seed(0)
    coarse = torch.randn(options.batch, 4, side // 4, side // 4, generator=drawing)
    clean = F.interpolate(coarse, size=(side, side), mode="bicubic")
    text = torch.randn(options.batch, TEXT_TOKENS, model.config.cross_attention_dim, generator=drawing)
    noisy = _noised(clean, options.repeats * STEPS, drawing, **_NOISE)
    # By position: tomesd's hook looks for the sample there.
    return Subject(model, side, options.batch, [((x, t), {"encoder_hidden_states": text}) for x, t in noisy])


def _embedded(options: Options) -> Subject:
    """The generator that comes with agglo, on noised images that it drew itself."""
    model, classes = generator.trained(), list(range(generator.N_CLASSES)) * 2
    drawn = generator.sample(model, classes, range(len(classes)), steps=10)
    calls = _noised(
        generator.to_model(drawn),
        GENERATED * options.repeats * STEPS,
        torch.Generator().manual_seed(0),
        **generator.NOISE,
    )
    side = generator.SHAPE["sample_size"] // generator.SHAPE["patch_size"]
    labels = torch.tensor(classes)
    return Subject(model, side, len(classes), [((x, torch.full((len(x),), t), labels), {}) for x, t in calls])


def _noised(clean: Tensor, n_calls: int, drawing: torch.Generator, **schedule: Any) -> list[tuple[Tensor, int]]:
    """Return images with the noise of steps from 980 to 20, and the steps."""
    from diffusers import DDIMScheduler

    noise, timesteps = torch.randn(clean.shape, generator=drawing), torch.linspace(980, 20, n_calls).long()
    batches = DDIMScheduler(**schedule).add_noise(*(x.expand(n_calls, *x.shape) for x in (clean, noise)), timesteps)
    return list(zip(batches, timesteps.tolist(), strict=True))


def run(options: Options) -> None:
    """Time all contenders, print a table for each architecture and write the record."""
    with torch_threads(options.threads):
        record = measure(options)
    conclude(record, describe(record), options.json)


def measure(options: Options) -> Record:
    """Return a run for every architecture."""
    return {"runs": [_measure(options, architecture) for architecture in options.architecture]}


@torch.inference_mode()
def _measure(options: Options, architecture: str) -> Record:
    """Time all contenders; return where and what ran, and the calls of each row."""
    device, dtype = require_device(options.device), dtype_named(options.dtype)
    is_trained = architecture == EMBEDDED
    subject = _embedded(options) if is_trained else _unet(architecture, options)
    versions = {name: version(name) for name in ("diffusers", "tomesd")}
    settings = {**options.settings(), "architecture": architecture, "batch": subject.images}
    header = {"machine": {**machine(device), **versions}, "settings": settings, "tokens": subject.side**2}
    model, clock = subject.model.to(device), PartClock(device)
    if dtype is not torch.float32:  # diffusers warns of any cast
        model.to(dtype)
    dense_outputs: dict[int, Tensor] = {}

    def moved(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(device, dtype if is_float else value.dtype) if isinstance(value, Tensor) else value

    def call(reduced: Any, turn: int) -> Record:
        clock.clear()
        given, named = tree_map(moved, subject.calls[turn])
        with stopwatch(device) as taken:
            output = reduced(*given, **named).sample
        about: Record = {"repeat": turn // STEPS, "step": turn % STEPS}
        about |= {
            "timestep": int(torch.as_tensor(given[1]).max()),
            "seconds": taken.seconds,
            "clustering": clock.get("clustering", 0.0),
        }
        if not is_trained:
            return about
        if turn not in dense_outputs:
            dense_outputs[turn] = model(*given, **named).sample
        return {**about, "error": float(distances("relative", dense_outputs[turn], output).mean())}

    rows = [{**row, "cannot": None, "calls": []} for row in contenders(architecture, options.keep_rates, subject.side)]
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
        calls = in_turns("diffusion", models, call, len(subject.calls), warm_up=0)
    for row, own in zip((row for row in rows if row["cannot"] is None), calls, strict=True):
        row["calls"] = own
    return {**header, "rows": rows}


_COLUMNS = {
    "keep_rate": Column("keep", "g", left=True),
    "name": Column("variant", left=True),
    "seconds": Column("s per step", ".3g"),
    "least": Column("least", ".3g"),
    "most": Column("most", ".3g"),
    "to_dense": Column("to dense", ".3f"),
    "to_tomesd": Column("to tomesd", ".3f"),
    "clustering": Column("clustering, s", ".3f"),
    "error": Column("error, %", ".1f"),
}


def summaries(record: Record) -> list[Record]:
    """Return the numbers of each row of a run by the names of columns, without those that make no sense."""
    dense = next(row for row in record["rows"] if row["name"] == DENSE)
    # tomesd itself where it ran, and otherwise agglo's.
    tomesd = {
        row["keep_rate"]: row
        for name in (OWN_TOMESD, TOMESD)
        for row in record["rows"]
        if row["name"] == name and row["calls"]
    }
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
            if "error" in row["calls"][0] and row is not dense:
                one["error"] = 100 * mean(call["error"] for call in row["calls"])
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
    """Return a table for each architecture."""
    return "\n\n".join(map(_describe_one, record["runs"]))


def _describe_one(record: Record) -> str:
    chosen, found = record["settings"], record["machine"]
    timesteps = [call["timestep"] for row in record["rows"] if row["name"] == DENSE for call in row["calls"]]
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "diffusers", "tomesd") if found[name])
    is_trained = chosen["architecture"] == EMBEDDED
    size = "" if is_trained else f"{chosen['size']} x {chosen['size']} pixels, "
    what = (
        f"**{chosen['architecture']}**, {'trained' if is_trained else 'random'} weights, {size}{record['tokens']} "
        f"tokens, batch {chosen['batch']}, {chosen['dtype']}, {len(timesteps)} steps from {timesteps[0]} to "
        f"{timesteps[-1]}; {versions}"
    )
    rows = summaries(record)
    shown = [name for name in _COLUMNS if any(name in row for row in rows)]
    table = Table([_COLUMNS[name] for name in shown], [[row.get(name) for name in shown] for row in rows])
    return page(record, what, table, *not_run(record))


def not_run(record: Record) -> list[str]:
    rows = [row for row in record["rows"] if row["cannot"]]
    return [f"not run: {row['name']} at keep {row['keep_rate']:g}: {row['cannot']}" for row in rows]
