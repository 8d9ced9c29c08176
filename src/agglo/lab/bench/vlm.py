"""A vision-language model's time to its first token: dense, and with fewer image tokens.

    picture       of an image: vision tower, connector, and what is merged between
    prefill       the prompt through the language model, to the first token of the answer
    first token   both: how long a user waits

At every share of image tokens that are kept:

    merged            ATC inside the tower, at a quarter, a half and three quarters of its depth; the groups stay merged
    merged late       the tower runs whole, ATC merges its tokens once
    random            the tower runs whole, tokens are dropped at random: what merging must beat in accuracy
    smaller image     the image is scaled down to about as many tokens: what all of them must beat

All contenders take turns within every repeat, there and back, so that a slow machine slows all of them; ratios
are taken within a repeat. The dense model runs twice, to show how much is noise. Weights are random: this measures
time, and says nothing about answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from agglo.config import ReductionConfig
from agglo.hosts import UnsupportedModelError
from agglo.lab.bench import TimingOptions
from agglo.lab.bench.vlm_models import SIZES, Prompt, Size, prompt
from agglo.lab.options import AtLeastOne, option
from agglo.patch import apply, image_tokens, remove
from agglo.schedule import Counts, default_blocks
from agglo.utils.devices import dtype_named, require_device, torch_threads
from agglo.utils.files import write_json
from agglo.utils.machine import load_warning, machine
from agglo.utils.progress import progress
from agglo.utils.tables import Column, Table
from agglo.utils.timing import median_ratio, stopwatch, turns

PARTS = ("picture", "prefill", "first token")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass
class Contender:
    """One way to fewer tokens.

    Attributes:
        config: None leaves the model as it is.
        side: Of the image, in pixels.
        passes: Seconds of each part of every repeat.
    """

    name: str
    kept: float
    config: ReductionConfig | None
    side: int
    n_tokens: int = 0
    prompt: Prompt | None = None
    passes: list[dict[str, float]] = field(default_factory=list)

    def seconds(self, part: str) -> float:
        return median(each[part] for each in self.passes)

    def speed(self, dense: Contender, part: str) -> float:
        """Return how many times as fast as the dense model it is."""
        return median_ratio([each[part] for each in dense.passes], [each[part] for each in self.passes])


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    model: str = option(
        "llava-small", ", ".join(f"{name} ({size.about})" for name, size in SIZES.items()), choices=SIZES
    )
    keep: Sequence[float] = option((0.5, 0.25, 0.125), "fractions of image tokens that reach the language model")
    batch_size: AtLeastOne = option(1, "prompts")
    images: AtLeastOne = option(1, "in each prompt", flags=("--pictures",))
    words: AtLeastOne = option(32, "in each prompt")
    repeats: AtLeastOne = 5
    clock: Literal["wall", "processor"] = option(
        "wall", "wall, or processor: the time this process computed, for a CPU on which others compute too"
    )
    device: str = option("cpu", metavar="D")
    dtype: str = option("float32", "float32, bfloat16 or float16", metavar="DTYPE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for kept in self.keep:
            if not 0 < kept < 1:
                raise ValueError(f"--keep {kept:g} must be a fraction of the tokens, between 0 and 1")
        if self.clock == "processor" and (self.device != "cpu" or self.threads != 1):
            raise ValueError(
                "--clock processor adds up what all threads compute: it goes with --device cpu --threads 1"
            )


def run(options: Options) -> None:
    """Time all contenders, print a table and write the record after every repeat."""
    device, dtype = require_device(options.device), dtype_named(options.dtype)
    size = SIZES[options.model]
    with torch_threads(options.threads):
        torch.manual_seed(0)
        model = size.build().eval().to(device, dtype)
        model.generation_config.pad_token_id = 0
        contenders, skipped = prepared(model, size, options, device, dtype)
        settings = {**asdict(options), "pictures": options.images}  # as earlier records spell it
        del settings["json"], settings["images"]
        record: dict[str, Any] = {"machine": machine(device), "settings": settings, "skipped": skipped}
        with progress(len(contenders) * (options.repeats + 1), "bench vlm") as advance:
            for repeat, order in turns(contenders, options.repeats):
                for contender in order:
                    timed = one_pass(model, contender, device, CLOCKS[options.clock])
                    if repeat >= 0:
                        contender.passes.append(timed)
                    turn = "warm-up" if repeat < 0 else f"repeat {repeat + 1}"
                    advance(f"{contender.name} {contender.kept:g}, {turn}")
                if repeat >= 0:
                    record["results"] = results(contenders)
                    if options.json is not None:
                        write_json(options.json, record)
        print("\n".join([headline(record), body(record).markdown(), *notes(record)]))


def prepared(
    model: Any, size: Size, options: Options, device: torch.device, dtype: torch.dtype
) -> tuple[list[Contender], list[str]]:
    """Return all contenders with their prompts, the dense model first and last; and which cannot run, and why."""
    found, skipped = [], []
    for contender in [Contender("dense", 1.0, None, size.side), *_variants(model, size, options.keep)]:
        try:
            _apply(model, contender)
        except (UnsupportedModelError, ValueError) as error:
            skipped.append(f"{contender.name} {contender.kept:g}: {error}")
            continue
        dense = size.tokens(contender.side)
        contender.n_tokens = dense if contender.config is None else image_tokens(model, dense)
        made = prompt(size, options.batch_size, options.images, options.words, contender.n_tokens, contender.side)
        pixels = {name: value.to(device) for name, value in made.pixels.items()}
        pixels["pixel_values"] = pixels["pixel_values"].to(dtype)
        contender.prompt = Prompt(pixels, {name: value.to(device) for name, value in made.others.items()})
        found.append(contender)
    again = Contender("dense again", 1.0, None, size.side, found[0].n_tokens, found[0].prompt)
    return [*found, again], skipped


def _variants(model: Any, size: Size, kept: Sequence[float]) -> list[Contender]:
    blocks = default_blocks(_depth(model))
    patches = size.patches(size.side)
    made = []
    for share in kept:
        steps = [int(patches * share ** ((stage + 1) / len(blocks)) + 1e-9) for stage in range(len(blocks))]
        stages = ReductionConfig(schedule=Counts(steps, blocks), output="merged")
        late = ReductionConfig(keep_rate=share, output="merged_late")
        at_random = ReductionConfig("random", keep_rate=share, output="merged_late", options={"seed": 0})
        made += [
            Contender("merged", share, stages, size.side),
            Contender("merged late", share, late, size.side),
            Contender("random", share, at_random, size.side),
        ]
        if size.patches_per_token == 1:
            smaller = ReductionConfig(keep_rate=share, output="smaller_image")
            made.append(Contender("smaller image", share, smaller, size.side))
        else:  # a model that takes images of any size is given a smaller one
            unit = size.patch * round(size.patches_per_token**0.5)
            made.append(Contender("smaller image", share, None, round(size.side * share**0.5 / unit) * unit))
    return made


def _depth(model: Any) -> int:
    vision = model.config.vision_config
    return int(vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers)


def _apply(model: Any, contender: Contender) -> None:
    if contender.config is None:
        remove(model)
    else:
        apply(model, contender.config)


@torch.inference_mode()
def one_pass(model: Any, contender: Contender, device: torch.device, clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds of each part of one pass."""
    _apply(model, contender)
    assert contender.prompt is not None
    with stopwatch(device, clock) as tower:
        encoded = model.model.get_image_features(**contender.prompt.pixels, return_dict=True)
    given = {**contender.prompt.others, "mm_encoder_outputs": {"image": encoded}}
    with stopwatch(device, clock) as prefill:
        model.generate(**given, max_new_tokens=1, do_sample=False, eos_token_id=None)
    seconds = {"picture": tower.seconds, "prefill": prefill.seconds}
    return {**seconds, "first token": sum(seconds.values())}


def results(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Return what the JSON file holds of each contender."""
    dense, found = contenders[0], []
    for contender in contenders:
        assert contender.prompt is not None
        row: dict[str, Any] = {"name": contender.name, "kept": contender.kept, "image_tokens": contender.n_tokens}
        row["prompt_tokens"] = int(contender.prompt.others["input_ids"].shape[1])
        row["seconds"] = {part: [each[part] for each in contender.passes] for part in PARTS}
        row["median"] = {part: contender.seconds(part) for part in PARTS}
        row["to_dense"] = {part: contender.speed(dense, part) for part in PARTS}
        found.append(row)
    return found


_COLUMNS = (
    Column("kept", ".3g"),
    Column("way", left=True),
    Column("image tokens"),
    Column("prompt"),
    *(Column(f"{part}, ms", ".0f") for part in PARTS),
    Column("x dense: prefill", ".2f"),
    Column("first token", ".2f"),
)


def headline(report: dict[str, Any]) -> str:
    """Return what ran, and where."""
    settings, where = report["settings"], report["machine"]
    repeats = len(report["results"][0]["seconds"]["prefill"])
    shown = "1 image" if settings["pictures"] == 1 else f"{settings['pictures']} images"
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
    """Return how much is noise, whether others were at work, and what did not run."""
    dense, again = report["results"][0], report["results"][-1]
    pairs = zip(again["seconds"]["first token"], dense["seconds"]["first token"], strict=True)
    noise = max(abs(a / b - 1) for a, b in pairs)
    lines = [f"noise: timed twice in this run, the dense model was up to {noise:.1%} off itself"]
    busy = load_warning(report["machine"])
    return [*lines, *([busy] if busy else []), *(f"not run: {reason}" for reason in report["skipped"])]
