"""Vision-language models of well-known sizes with random weights, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agglo.lab.bench.adapter import smooth_images

IMAGE_TOKEN = 1
_FIRST_WORD = 16  # tokens before it are special
_SMALL = {  # the sizes of a language model of 135 million parameters
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_SPECIAL = {"video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6, "image_token_id": IMAGE_TOKEN}
_MROPE = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1000000.0}


@dataclass(frozen=True)
class Prompt:
    """What a model is given. pixels: for `get_image_features`; others: for `generate`."""

    pixels: dict[str, Tensor]
    others: dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A model of a known size.

    Attributes:
        images: Makes the arguments of `get_image_features` of a number of images and their side in pixels.
        patches_per_token: How many patches the connector makes one token of.
    """

    about: str
    build: Callable[[], Any]
    images: Callable[[int, int], dict[str, Tensor]]
    side: int
    patch: int
    patches_per_token: int = 1

    def patches(self, side: int) -> int:
        return (side // self.patch) ** 2

    def tokens(self, side: int) -> int:
        return self.patches(side) // self.patches_per_token


def prompt(size: Size, batch: int, n_images: int, n_words: int, n_tokens: int, side: int) -> Prompt:
    """Return prompts of n_words words with images in the middle, each of n_tokens tokens."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(_FIRST_WORD, 4096, (batch, n_words), generator=generator)
    marks = torch.full((batch, 1), _SPECIAL["vision_start_token_id"])
    placeholders = torch.full((batch, n_tokens), IMAGE_TOKEN)
    middle = [part for _ in range(n_images) for part in (marks, placeholders)]
    ids = torch.cat([words[:, : n_words // 2], *middle, words[:, n_words // 2 :]], dim=1)
    pixels = size.images(batch * n_images, side)
    others = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "image_grid_thw" in pixels:
        others |= {"mm_token_type_ids": (ids == IMAGE_TOKEN).int(), "image_grid_thw": pixels["image_grid_thw"]}
    return Prompt(pixels, others)


def _plain_images(count: int, side: int) -> dict[str, Tensor]:
    return {"pixel_values": smooth_images(count, side, side)}


def _qwen_images(count: int, side: int) -> dict[str, Tensor]:
    from transformers import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(size={"shortest_edge": side * side, "longest_edge": side * side})
    shown = ((smooth_images(count, side, side) + 3) / 6).clamp(0, 1).mul(255).to(torch.uint8)
    return dict(processor(images=list(shown), return_tensors="pt"))


def _llava(vision: dict[str, Any], text: dict[str, Any]) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    settings = {"vision_config": {"model_type": "clip_vision_model", **vision}, "image_token_index": IMAGE_TOKEN}
    return LlavaForConditionalGeneration(LlavaConfig(**settings, text_config={"model_type": "llama", **text}))


def _llava_small() -> Any:
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    return _llava({**vision, "image_size": 224, "patch_size": 16}, _SMALL)


def _llava_7b() -> Any:
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    return _llava({**vision, "image_size": 336, "patch_size": 14}, {"vocab_size": 32064})  # the others are Llama's own


def _qwen2(vision: dict[str, Any], text: dict[str, Any]) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {**text, "rope_parameters": _MROPE, "bos_token_id": 2, "eos_token_id": 3}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, text_config=text, **_SPECIAL))


def _qwen2_small() -> Any:
    return _qwen2({"embed_dim": 768, "depth": 12, "num_heads": 12, "hidden_size": 576}, _SMALL)


def _qwen2_2b() -> Any:
    text = {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936,
    }  # fmt: skip
    return _qwen2({"hidden_size": 1536}, text)


SIZES = {
    "llava-small": Size("LLaVA: CLIP ViT-B/16 at 224, language model of 135 M", _llava_small, _plain_images, 224, 16),
    "llava-1.5-7b": Size("LLaVA 1.5: CLIP ViT-L/14 at 336, Llama of 7 B", _llava_7b, _plain_images, 336, 14),
    "qwen2-vl-small": Size("Qwen2-VL: ViT-B, language model of 135 M", _qwen2_small, _qwen_images, 448, 14, 4),
    "qwen2-vl-2b": Size("Qwen2-VL 2B", _qwen2_2b, _qwen_images, 896, 14, 4),
}
