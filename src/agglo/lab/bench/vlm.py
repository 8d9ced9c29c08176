"""A vision-language model's time to its first token: dense, and with fewer image tokens.

    image         vision tower, connector, and what is merged between
    prefill       the prompt through the language model, to the first token of the answer
    first token   both: how long a user waits

At every fraction of image tokens that are kept:

    merged            ATC inside the tower, at a quarter, a half and three quarters of its depth; the groups stay merged
    merged late       the tower runs whole, ATC merges its tokens once
    random            the tower runs whole, tokens are dropped at random: what merging must beat in accuracy
    smaller image     the image is scaled down to about as many tokens: what all of them must beat

The dense model runs twice, to show how much is noise. Weights are random: this measures time, and says nothing about
answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agglo.config import ReductionConfig
from agglo.lab.bench import TimingOptions, conclude, in_turns, noise, noise_line, page, smooth_images
from agglo.lab.evaluation.grid import Reducible
from agglo.lab.options import AtLeastOne, option
from agglo.patch import image_tokens
from agglo.schedule import Counts, default_blocks
from agglo.utils.devices import dtype_named, require_device, torch_threads
from agglo.utils.machine import machine
from agglo.utils.tables import Column, Table
from agglo.utils.timing import median_ratio, stopwatch

PARTS = ("image", "prefill", "first token")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
IMAGE_TOKEN, START_TOKEN = 1, 5
_FIRST_WORD = 16  # tokens before it are special
# The sizes of a language model of 135 million parameters; of the tower the rest is ViT-B.
_TEXT = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_VISION = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 16}
# Configurations of LLaVA's tower and language model; none is transformers' own default.
MODELS: dict[str, dict[str, Any]] = {
    "llava-small": {"vision_config": _VISION, "text_config": _TEXT},
    "llava-1.5-7b": {},
}


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    model: str = option(
        "llava-small",
        "llava-small (CLIP ViT-B/16 at 224, language model of 135 M), llava-1.5-7b (CLIP ViT-L/14 at 336, Llama)",
        choices=MODELS,
    )
    keep: Sequence[float] = option((0.5, 0.25, 0.125), "fractions of image tokens that reach the language model")
    batch_size: AtLeastOne = option(1, "prompts")
    images: AtLeastOne = option(1, "in each prompt")
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


class Contender(NamedTuple):
    """One way to fewer tokens; without a config the model stays as it is."""

    name: str
    kept: float = 1.0
    config: ReductionConfig | None = None


def build(name: str) -> Any:
    """Build a LLaVA with random weights."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    model: Any = LlavaForConditionalGeneration(LlavaConfig(**MODELS[name], image_token_index=IMAGE_TOKEN))
    model.generation_config.pad_token_id = 0
    return model.eval()


def run(options: Options) -> None:
    """Time all contenders, print a table and write the record."""
    device, dtype, clock = require_device(options.device), dtype_named(options.dtype), CLOCKS[options.clock]
    with torch_threads(options.threads):
        on = machine(device)
        model = build(options.model).to(device, dtype)
        ways = contenders(model.config.vision_config, options.keep)
        reducible = Reducible(model, None, "random weights")
        prompts = {}
        for contender in ways:
            reducible.apply(contender.config)
            prompts[contender.name, contender.kept] = prompt(model, contender.config, options)
        n_images, side = options.batch_size * options.images, model.config.vision_config.image_size
        pixels = smooth_images(n_images, 3, side, side).to(device, dtype)

        @torch.inference_mode()
        def seconds(contender: Contender, repeat: int) -> dict[str, float]:
            reducible.apply(contender.config)
            with stopwatch(device, clock) as tower:
                encoded = model.model.get_image_features(pixel_values=pixels, return_dict=True)
            ids = prompts[contender.name, contender.kept]
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_encoder_outputs": {"image": encoded}}
            with stopwatch(device, clock) as prefill:
                model.generate(**given, max_new_tokens=1, do_sample=False, eos_token_id=None)
            both = tower.seconds + prefill.seconds
            return {"image": tower.seconds, "prefill": prefill.seconds, "first token": both}

        passes = in_turns("vlm", ways, seconds, options.repeats)
    by_part = [{part: [each[part] for each in own] for part in PARTS} for own in passes]
    results = []
    for contender, own in zip(ways, by_part, strict=True):
        ids = prompts[contender.name, contender.kept][0]
        results.append(
            {
                "name": contender.name,
                "kept": contender.kept,
                "image_tokens": int((ids == IMAGE_TOKEN).sum()) // options.images,
                "prompt_tokens": len(ids),
                "seconds": own,
                "median": {part: median(own[part]) for part in PARTS},
                "to_dense": {part: median_ratio(by_part[0][part], own[part]) for part in PARTS},
            }
        )
    record = {"machine": on, "settings": options.settings(), "results": results}
    conclude(record, describe(record), options.json)


def contenders(vision: Any, kept: Sequence[float]) -> list[Contender]:
    """Return all contenders, the dense model first and last."""
    blocks = default_blocks(vision.num_hidden_layers)
    patches = (vision.image_size // vision.patch_size) ** 2
    found = [Contender("dense")]
    for rate in kept:
        steps = [int(patches * rate ** ((stage + 1) / len(blocks)) + 1e-9) for stage in range(len(blocks))]
        late: dict[str, Any] = {"keep_rate": rate, "output": "merged_late"}
        found += [
            Contender("merged", rate, ReductionConfig(schedule=Counts(steps, blocks), output="merged")),
            Contender("merged late", rate, ReductionConfig(**late)),
            Contender("random", rate, ReductionConfig("random", **late, options={"seed": 0})),
            Contender("smaller image", rate, ReductionConfig(keep_rate=rate, output="smaller_image")),
        ]
    return [*found, Contender("dense again")]


def prompt(model: Any, config: ReductionConfig | None, options: Options) -> Tensor:
    """Return prompts (B, N) of so many words, with as many tokens of the images in the middle as the model has now."""
    vision, batch, middle = model.config.vision_config, options.batch_size, options.words // 2
    dense = (vision.image_size // vision.patch_size) ** 2
    n_tokens = dense if config is None else image_tokens(model, dense)
    words = torch.randint(_FIRST_WORD, 4096, (batch, options.words), generator=torch.Generator().manual_seed(0))
    image = torch.tensor([[START_TOKEN, *[IMAGE_TOKEN] * n_tokens]]).expand(batch, -1)
    return torch.cat([words[:, :middle], *[image] * options.images, words[:, middle:]], dim=1).to(model.device)


def describe(record: Mapping[str, Any]) -> str:
    settings, results = record["settings"], record["results"]
    images = "1 image" if settings["images"] == 1 else f"{settings['images']} images"
    what = (
        f"{settings['model']} with random weights, batch {settings['batch_size']}, {images} and {settings['words']} "
        f"words per prompt, {settings['dtype']}, {settings['clock']} time, median of {settings['repeats']} repeats"
    )
    columns = [Column("kept", ".3g"), Column("way", left=True), Column("image tokens"), Column("prompt")]
    columns += [Column(f"{part}, ms", ".0f") for part in PARTS]
    columns += [Column("x dense: prefill", ".2f"), Column("first token", ".2f")]
    rows = []
    for row in results:
        times = [1000 * row["median"][part] for part in PARTS]
        speeds = [row["to_dense"][part] for part in ("prefill", "first token")]
        rows.append([row["kept"], row["name"], row["image_tokens"], row["prompt_tokens"], *times, *speeds])
    off = noise(*(results[number]["seconds"]["first token"] for number in (0, -1)))
    return page(record, what, Table(columns, rows), noise_line(off))
