"""A vision-language model's time to its first token: dense, and with fewer image tokens.

    picture       vision tower, connector, and what is merged between
    prefill       the prompt through the language model, to the first token of the answer
    first token   both: how long a user waits

At every share of image tokens that are kept:

    merged            ATC inside the tower, at a quarter, a half and three quarters of its depth; the groups stay merged
    merged late       the tower runs whole, ATC merges its tokens once
    random            the tower runs whole, tokens are dropped at random: what merging must beat in accuracy
    smaller picture   the picture is scaled down to about as many tokens: what all of them must beat

All variants take turns within every repeat, there and back, so that a machine that slows down slows all of them; ratios
are taken within a repeat. The dense model runs twice, to show how much is noise. Weights are random: this measures
time, and says nothing about answers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agglo.bench.vlm_models import SIZES, Prompt, Size, prompt
from agglo.experiments.devices import dtype_named, require_device, torch_threads
from agglo.experiments.files import require_output, write_json
from agglo.experiments.machine import load_warning, machine
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table
from agglo.hosts import UnsupportedModelError
from agglo.patching import apply, image_tokens, remove
from agglo.schedule import Counts, default_blocks

PARTS = ("picture", "prefill", "first token")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass
class Variant:
    """One way to fewer tokens. arguments: of `agglo.apply`; None leaves the model as it is.
    side: of the picture, in pixels. passes: seconds of each part of every repeat."""

    name: str
    kept: float
    arguments: dict[str, Any] | None
    side: int
    n_tokens: int = 0
    prompt: Prompt | None = None
    passes: list[dict[str, float]] = field(default_factory=list)

    def seconds(self, part: str) -> float:
        return median(each[part] for each in self.passes)

    def speed(self, dense: Variant, part: str) -> float:
        """How many times as fast as the dense model."""
        return median(its[part] / mine[part] for mine, its in zip(self.passes, dense.passes, strict=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(f"{name} ({size.about})" for name, size in SIZES.items())
    parser.add_argument("--model", choices=SIZES, default="llava-small", metavar="NAME", help=f"{names}")
    share = "shares of image tokens that reach the language model (default: 0.5 0.25 0.125)"
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25, 0.125], metavar="F", help=share)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=1, metavar="N", help="in each prompt (default: %(default)s)")
    parser.add_argument("--words", type=int, default=32, metavar="N", help="in each prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: as it is)")
    clock = "wall, or processor: the time this process computed, for a CPU on which others compute too"
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=f"{clock} (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="F", help="every timing, the machine and the settings")


def run(arguments: argparse.Namespace) -> None:
    for name in ("batch_size", "pictures", "words", "repeats"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    for kept in arguments.keep:
        if not 0 < kept < 1:
            raise ValueError(f"--keep {kept:g} must be a share of the tokens, between 0 and 1")
    if arguments.json is not None:
        require_output(arguments.json)
    device, dtype = require_device(arguments.device), dtype_named(arguments.dtype)
    if arguments.clock == "processor" and (device.type != "cpu" or arguments.threads != 1):
        raise ValueError("--clock processor adds up what all threads compute: it goes with --device cpu --threads 1")
    size = SIZES[arguments.model]
    with torch_threads(arguments.threads):
        torch.manual_seed(0)
        model = size.build().eval().to(device, dtype)
        model.generation_config.pad_token_id = 0
        variants, skipped = prepared(model, size, arguments, device, dtype)
        settings = {name: value for name, value in vars(arguments).items() if name not in ("run", "json", "subject")}
        settings = {name: value for name, value in settings.items() if isinstance(value, (str, int, float, list))}
        report: dict[str, Any] = {"machine": machine(device), "settings": settings, "skipped": skipped}
        with progress(len(variants) * (arguments.repeats + 1), "bench vlm") as advance:
            for repeat in range(arguments.repeats + 1):
                for variant in variants if repeat % 2 == 0 else reversed(variants):
                    timed = one_pass(model, variant, device, CLOCKS[arguments.clock])
                    if repeat:  # the first one compiles kernels and fills caches
                        variant.passes.append(timed)
                    advance(f"{variant.name} {variant.kept:g}, {'repeat ' + str(repeat) if repeat else 'warm-up'}")
                if repeat and arguments.json is not None:
                    write_json(arguments.json, {**report, "results": results(variants)})
        print(table({**report, "results": results(variants)}))


def prepared(
    model: Any, size: Size, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[list[Variant], list[str]]:
    """All variants with their prompts, the dense model first and last; and which cannot run, and why."""
    found, skipped = [], []
    for variant in [Variant("dense", 1.0, None, size.side), *_variants(model, size, arguments.keep)]:
        try:
            _apply(model, variant)
        except (UnsupportedModelError, ValueError) as error:
            skipped.append(f"{variant.name} {variant.kept:g}: {error}")
            continue
        dense = size.tokens(variant.side)
        variant.n_tokens = dense if variant.arguments is None else image_tokens(model, dense)
        made = prompt(size, arguments.batch_size, arguments.pictures, arguments.words, variant.n_tokens, variant.side)
        pixels = {name: value.to(device) for name, value in made.pixels.items()}
        pixels["pixel_values"] = pixels["pixel_values"].to(dtype)
        variant.prompt = Prompt(pixels, {name: value.to(device) for name, value in made.others.items()})
        found.append(variant)
    again = Variant("dense again", 1.0, None, size.side, found[0].n_tokens, found[0].prompt)
    return [*found, again], skipped


def _variants(model: Any, size: Size, kept: Sequence[float]) -> list[Variant]:
    blocks = default_blocks(_depth(model))
    patches = size.patches(size.side)
    made = []
    for share in kept:
        steps = [int(patches * share ** ((stage + 1) / len(blocks)) + 1e-9) for stage in range(len(blocks))]
        late = {"keep_rate": share, "output": "merged late"}
        made += [
            Variant("merged", share, {"schedule": Counts(steps, blocks), "output": "merged"}, size.side),
            Variant("merged late", share, late, size.side),
            Variant("random", share, {"method": "random", "seed": 0, **late}, size.side),
        ]
        if size.patches_per_token == 1:
            smaller = {"keep_rate": share, "output": "smaller picture"}
            made.append(Variant("smaller picture", share, smaller, size.side))
        else:  # a model that takes pictures of any size is given a smaller one
            unit = size.patch * round(size.patches_per_token**0.5)
            made.append(Variant("smaller picture", share, None, round(size.side * share**0.5 / unit) * unit))
    return made


def _depth(model: Any) -> int:
    vision = model.config.vision_config
    return int(vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers)


def _apply(model: Any, variant: Variant) -> None:
    if variant.arguments is None:
        remove(model)
    else:
        apply(model, **variant.arguments)


@torch.inference_mode()
def one_pass(model: Any, variant: Variant, device: torch.device, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each part of one pass."""

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return clock()

    _apply(model, variant)
    assert variant.prompt is not None
    begin = now()
    encoded = model.model.get_image_features(**variant.prompt.pixels, return_dict=True)
    seen = now()
    given = {**variant.prompt.others, "mm_encoder_outputs": {"image": encoded}}
    model.generate(**given, max_new_tokens=1, do_sample=False, eos_token_id=None)
    end = now()
    return {"picture": seen - begin, "prefill": end - seen, "first token": end - begin}


def results(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """What the JSON file holds of each variant."""
    dense, found = variants[0], []
    for variant in variants:
        assert variant.prompt is not None
        row: dict[str, Any] = {"name": variant.name, "kept": variant.kept, "image_tokens": variant.n_tokens}
        row["prompt_tokens"] = int(variant.prompt.others["input_ids"].shape[1])
        row["seconds"] = {part: [each[part] for each in variant.passes] for part in PARTS}
        row["median"] = {part: variant.seconds(part) for part in PARTS}
        row["to_dense"] = {part: variant.speed(dense, part) for part in PARTS}
        found.append(row)
    return found


_COLUMNS = (
    Column("kept", ".3g"),
    Column("variant", left=True),
    Column("image tokens"),
    Column("prompt"),
    *(Column(f"{part}, ms", ".0f") for part in PARTS),
    Column("x dense: prefill", ".2f"),
    Column("first token", ".2f"),
)


def table(report: dict[str, Any]) -> str:
    """Text for a terminal."""
    return "\n".join([headline(report), body(report).markdown(), *notes(report)])


def headline(report: dict[str, Any]) -> str:
    """What ran, and where."""
    settings, where = report["settings"], report["machine"]
    repeats = len(report["results"][0]["seconds"]["prefill"])
    shown = "1 picture" if settings["pictures"] == 1 else f"{settings['pictures']} pictures"
    what = f"{settings['model']} with random weights, batch {settings['batch_size']}, {shown} and "
    what += f"{settings['words']} words per prompt, {settings['dtype']}, {settings['clock']} time, "
    what += f"median of {repeats} repeats"
    return f"{what}, {where['gpu'] or '{cpu}, threads: {threads}'.format(**where)}"


def body(report: dict[str, Any]) -> Table:
    return Table(_COLUMNS, list(map(_cells, report["results"])))


def _cells(row: dict[str, Any]) -> list[Any]:
    times = [1000 * row["median"][part] for part in PARTS]
    speeds = [row["to_dense"][part] for part in ("prefill", "first token")]
    return [row["kept"], row["name"], row["image_tokens"], row["prompt_tokens"], *times, *speeds]


def notes(report: dict[str, Any]) -> list[str]:
    """How much is noise, whether others were at work, and what did not run."""
    dense, again = report["results"][0], report["results"][-1]
    pairs = zip(again["seconds"]["first token"], dense["seconds"]["first token"], strict=True)
    noise = max(abs(a / b - 1) for a, b in pairs)
    lines = [f"noise: timed twice in this run, the dense model was up to {noise:.1%} off itself"]
    busy = load_warning(report["machine"])
    return [*lines, *([busy] if busy else []), *(f"not run: {reason}" for reason in report["skipped"])]
