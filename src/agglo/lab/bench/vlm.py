"""A vision-language model's time to its first token: dense, and with fewer image tokens.

    image         vision tower, connector, and what is merged between
    prefill       the prompt through the language model, to the first token of the answer
    first token   both: how long a user waits

At every fraction of image tokens that are kept:

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
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from agglo.config import ReductionConfig
from agglo.lab.bench import TimingOptions, conclude, noise, noise_line, where
from agglo.lab.bench.adapter import smooth_images
from agglo.lab.options import AtLeastOne, option
from agglo.patch import apply, image_tokens, remove
from agglo.schedule import Counts, default_blocks
from agglo.utils.devices import dtype_named, require_device, torch_threads
from agglo.utils.machine import machine
from agglo.utils.progress import progress
from agglo.utils.tables import Column, Table
from agglo.utils.timing import median_ratio, stopwatch, turns

PARTS = ("image", "prefill", "first token")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
IMAGE_TOKEN, START_TOKEN = 1, 5
_FIRST_WORD = 16  # tokens before it are special
_SMALL_TEXT = {  # the sizes of a language model of 135 million parameters
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_SMALL_VISION = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 16}  # the rest is ViT-B
_QWEN_TEXT = {
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "bos_token_id": 2, "eos_token_id": 3,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A model of a known size with random weights.

    Attributes:
        side: Of its images, in pixels.
        patch: Of a patch, in pixels.
        vision, text: Its two configurations; None is transformers' own default.
        patches_per_token: Patches that the connector makes one token of: 4 for Qwen2-VL, 1 for LLaVA.
    """

    about: str
    side: int
    patch: int
    vision: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    patches_per_token: int = 1

    @property
    def is_qwen(self) -> bool:
        return self.patches_per_token > 1

    def build(self) -> Any:
        from transformers import (
            LlavaConfig,
            LlavaForConditionalGeneration,
            Qwen2VLConfig,
            Qwen2VLForConditionalGeneration,
        )

        if self.is_qwen:
            special = {"image_token_id": IMAGE_TOKEN, "video_token_id": 4, "vision_end_token_id": 6}
            config = Qwen2VLConfig(
                text_config=self.text, vision_config=self.vision, vision_start_token_id=START_TOKEN, **special
            )
            return Qwen2VLForConditionalGeneration(config)
        config = LlavaConfig(vision_config=self.vision, text_config=self.text, image_token_index=IMAGE_TOKEN)
        return LlavaForConditionalGeneration(config)

    def images(self, count: int, side: int) -> dict[str, Tensor]:
        """Return the arguments of `get_image_features` for smooth images."""
        images = smooth_images(count, side, side)
        if not self.is_qwen:
            return {"pixel_values": images}
        from transformers import Qwen2VLImageProcessor

        processor = Qwen2VLImageProcessor(size={"shortest_edge": side * side, "longest_edge": side * side})
        shown = ((images + 3) / 6).clamp(0, 1).mul(255).to(torch.uint8)
        return dict(processor(images=list(shown), return_tensors="pt"))

    def tokens(self, side: int) -> int:
        return (side // self.patch) ** 2 // self.patches_per_token


SIZES = {
    "llava-small": Size("LLaVA: CLIP ViT-B/16 at 224, language model of 135 M", 224, 16, _SMALL_VISION, _SMALL_TEXT),
    "llava-1.5-7b": Size("LLaVA 1.5: CLIP ViT-L/14 at 336, Llama of 7 B", 336, 14),
    "qwen2-vl-2b": Size("Qwen2-VL 2B", 896, 14, {"hidden_size": 1536}, _QWEN_TEXT, 4),
}


@dataclass
class Contender:
    """One way to fewer tokens.

    Attributes:
        config: None leaves the model as it is.
        side: Of the image, in pixels.
        pixels: Arguments of `get_image_features`.
        prompt: Arguments of `generate`.
        passes: Seconds of each part of every repeat.
    """

    name: str
    kept: float
    config: ReductionConfig | None
    side: int
    n_tokens: int = 0
    pixels: dict[str, Tensor] = field(default_factory=dict)
    prompt: dict[str, Tensor] = field(default_factory=dict)
    passes: list[dict[str, float]] = field(default_factory=list)

    def apply(self, model: Any) -> None:
        if self.config is None:
            remove(model)
        else:
            apply(model, self.config)

    def seconds(self, part: str) -> list[float]:
        return [each[part] for each in self.passes]


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    model: str = option(
        "llava-small", ", ".join(f"{name} ({size.about})" for name, size in SIZES.items()), choices=SIZES
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


def run(options: Options) -> None:
    """Time all contenders, print a table and write the record."""
    device, dtype = require_device(options.device), dtype_named(options.dtype)
    size = SIZES[options.model]
    with torch_threads(options.threads):
        torch.manual_seed(0)
        model = size.build().eval().to(device, dtype)
        model.generation_config.pad_token_id = 0
        on = machine(device)
        all_contenders = contenders(model, size, options.keep)
        for contender in all_contenders:
            prepare(contender, model, size, options, device, dtype)
        with progress(len(all_contenders) * (options.repeats + 1), "bench vlm") as advance:
            for repeat, order in turns(all_contenders, options.repeats):
                for contender in order:
                    timed = one_pass(model, contender, device, CLOCKS[options.clock])
                    if repeat >= 0:
                        contender.passes.append(timed)
                    advance(f"{contender.name} {contender.kept:g}")
    results = [result(contender, all_contenders[0]) for contender in all_contenders]
    record = {"machine": on, "settings": options.settings(), "results": results}
    conclude(record, "\n".join([headline(record), table(record).markdown(), noise_of(record)]), options.json)


def contenders(model: Any, size: Size, kept: Sequence[float]) -> list[Contender]:
    """Return all contenders, the dense model first and last."""
    vision = model.config.vision_config
    blocks = default_blocks(int(vision.depth if size.is_qwen else vision.num_hidden_layers))
    patches = size.tokens(size.side) * size.patches_per_token
    found = [Contender("dense", 1.0, None, size.side)]
    for share in kept:
        steps = [int(patches * share ** ((stage + 1) / len(blocks)) + 1e-9) for stage in range(len(blocks))]
        ways: dict[str, ReductionConfig | None] = {
            "merged": ReductionConfig(schedule=Counts(steps, blocks), output="merged"),
            "merged late": ReductionConfig(keep_rate=share, output="merged_late"),
            "random": ReductionConfig("random", keep_rate=share, output="merged_late", options={"seed": 0}),
        }
        side = size.side
        if size.is_qwen:  # takes images of any size, and is given a smaller one
            unit = 2 * size.patch
            side, ways["smaller image"] = round(side * share**0.5 / unit) * unit, None
        else:
            ways["smaller image"] = ReductionConfig(keep_rate=share, output="smaller_image")
        for name, config in ways.items():
            found.append(Contender(name, share, config, side if name == "smaller image" else size.side))
    return [*found, Contender("dense again", 1.0, None, size.side)]


def prepare(
    contender: Contender, model: Any, size: Size, options: Options, device: torch.device, dtype: torch.dtype
) -> None:
    """Give a contender its images, and prompts of so many words with the images in the middle."""
    contender.apply(model)
    dense = size.tokens(contender.side)
    contender.n_tokens = dense if contender.config is None else image_tokens(model, dense)
    batch, middle = options.batch_size, options.words // 2
    words = torch.randint(_FIRST_WORD, 4096, (batch, options.words), generator=torch.Generator().manual_seed(0))
    image = torch.tensor([[START_TOKEN, *[IMAGE_TOKEN] * contender.n_tokens]]).expand(batch, -1)
    ids = torch.cat([words[:, :middle], *[image] * options.images, words[:, middle:]], dim=1)
    contender.prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    contender.pixels = size.images(batch * options.images, contender.side)
    contender.pixels["pixel_values"] = contender.pixels["pixel_values"].to(dtype)
    if size.is_qwen:
        contender.prompt["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        contender.prompt["image_grid_thw"] = contender.pixels["image_grid_thw"]
    for given in (contender.prompt, contender.pixels):
        given.update({name: value.to(device) for name, value in given.items()})


@torch.inference_mode()
def one_pass(model: Any, contender: Contender, device: torch.device, clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds of each part of one pass."""
    contender.apply(model)
    with stopwatch(device, clock) as tower:
        encoded = model.model.get_image_features(**contender.pixels, return_dict=True)
    given = {**contender.prompt, "mm_encoder_outputs": {"image": encoded}}
    with stopwatch(device, clock) as prefill:
        model.generate(**given, max_new_tokens=1, do_sample=False, eos_token_id=None)
    return {"image": tower.seconds, "prefill": prefill.seconds, "first token": tower.seconds + prefill.seconds}


def result(contender: Contender, dense: Contender) -> dict[str, Any]:
    """Return what the JSON file holds of a contender; to_dense is how many times as fast it is."""
    return {
        "name": contender.name,
        "kept": contender.kept,
        "image_tokens": contender.n_tokens,
        "prompt_tokens": int(contender.prompt["input_ids"].shape[1]),
        "seconds": {part: contender.seconds(part) for part in PARTS},
        "median": {part: median(contender.seconds(part)) for part in PARTS},
        "to_dense": {part: median_ratio(dense.seconds(part), contender.seconds(part)) for part in PARTS},
    }


_COLUMNS = (
    Column("kept", ".3g"),
    Column("way", left=True),
    Column("image tokens"),
    Column("prompt"),
    *(Column(f"{part}, ms", ".0f") for part in PARTS),
    Column("x dense: prefill", ".2f"),
    Column("first token", ".2f"),
)


def headline(record: dict[str, Any]) -> str:
    """Return what ran, and where."""
    settings = record["settings"]
    images = "1 image" if settings["images"] == 1 else f"{settings['images']} images"
    return (
        f"{settings['model']} with random weights, batch {settings['batch_size']}, {images} and {settings['words']} "
        f"words per prompt, {settings['dtype']}, {settings['clock']} time, median of {settings['repeats']} repeats, "
        f"{where(record)}"
    )


def table(record: dict[str, Any]) -> Table:
    rows = []
    for row in record["results"]:
        times = [1000 * row["median"][part] for part in PARTS]
        speeds = [row["to_dense"][part] for part in ("prefill", "first token")]
        rows.append([row["kept"], row["name"], row["image_tokens"], row["prompt_tokens"], *times, *speeds])
    return Table(_COLUMNS, rows)


def noise_of(record: dict[str, Any]) -> str:
    dense, again = (record["results"][number]["seconds"]["first token"] for number in (0, -1))
    return noise_line(noise(dense, again))
