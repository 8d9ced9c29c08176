"""Tiny vision-language models of transformers with random weights, and processors that write their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = ["what", "is", "in", "this", "and", "here", "there", "a", "cat", "dog", "red", "blue"]
EXTRA = {
    "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "start_image_token": "<img>",
    "end_image_token": "</img>", "context_image_token": "<image>", "video_token": "<video>",
    "vision_start_token": "<vs>", "vision_end_token": "<ve>", "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
}  # fmt: skip
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
VOCABULARY = 160
CLIP = {
    "image_size": 64, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 8, "num_attention_heads": 3,
    "intermediate_size": 96,
}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": VOCABULARY,
}  # fmt: skip
CLIP_VISION, LLAMA = {"model_type": "clip_vision_model", **CLIP}, {"model_type": "llama", **TEXT}
SQUARE = {"height": 64, "width": 64}
QWEN_VISION = {
    "depth": 8, "hidden_size": 48, "out_hidden_size": 32, "num_heads": 3, "patch_size": 8, "intermediate_size": 96,
}  # fmt: skip
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
QWEN_TOKENS = {"image_token_id": 4, "video_token_id": 9, "vision_start_token_id": 10, "vision_end_token_id": 11}


@lru_cache
def tokenizer() -> Any:
    """A new one is loaded of it for every processor, since processors add tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    first = ["<pad>", "<unk>", "<bos>", "<eos>", *dict.fromkeys(EXTRA.values())]
    words = [*first, *ROWS, "\n", *WORDS]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


def new_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer().to_str()), pad_token="<pad>", unk_token="<unk>",
        bos_token="<bos>", eos_token="<eos>", extra_special_tokens=EXTRA, padding_side="left",
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": ROWS})
    return made


@dataclass(frozen=True)
class VLM:
    """One family. dense: tokens of an image without reduction. mark: what stands for an image in a prompt."""

    name: str
    build: Callable[[], Any]
    build_processor: Callable[[], Any]
    dense: int
    mark: str = "<image>"
    pointwise: bool = False
    nested: bool = False  # whether the processor wants a list of images for every prompt

    def model(self) -> Any:
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():  # away from the initialisation, at which much is zero or alike
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
        return model

    def processor(self) -> Any:
        return self.build_processor()

    def inputs(self, processor: Any, images: Sequence[Sequence[Any]]) -> Any:
        """A batch of prompts with so many images each."""
        texts = [" ".join(["what", "is", "in", "this", *([self.mark, "and"] * len(each)), "here"]) for each in images]
        given: Any = list(images) if self.nested else [one for each in images for one in each]
        return processor(images=given or None, text=texts, return_tensors="pt", padding=True)


def image(seed: int, height: int = 64, width: int = 64) -> Any:
    """Smooth, and another for each seed."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def _of(name: str, *arguments: Any, **options: Any) -> Any:
    """An instance of a class of transformers."""
    return getattr(transformers, name)(*arguments, **options)


def _model(name: str, **config: Any) -> Any:
    return _of(f"{name}ForConditionalGeneration", _of(f"{name}Config", **config))


def _llava(**changes: Any) -> Any:
    return _model("Llava", **{"vision_config": CLIP_VISION, "text_config": LLAMA, "image_token_index": 4, **changes})


def _llava_processor(**changes: Any) -> Any:
    images = _of("CLIPImageProcessor", size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    settings = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _of("LlavaProcessor", images, new_tokenizer(), **{**settings, **changes})


def _vipllava() -> Any:
    layers = [-2, -4, 2]
    return _model(
        "VipLlava", vision_config=CLIP_VISION, text_config=LLAMA, image_token_index=4, vision_feature_layers=layers
    )


def _paligemma() -> Any:
    text = {"model_type": "gemma", **TEXT, "head_dim": 16}
    sizes = {"projection_dim": 32, "hidden_size": 32, "vocab_size": VOCABULARY}
    vision = {**SIGLIP, "projection_dim": 32}
    return _model("PaliGemma", vision_config=vision, text_config=text, image_token_index=4, **sizes)


def _paligemma_processor() -> Any:
    images = _of("SiglipImageProcessor", size=SQUARE)
    images.image_seq_length = 64
    return _of("PaliGemmaProcessor", images, new_tokenizer())


def _gemma3() -> Any:
    text = {**TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40}
    tokens = {"mm_tokens_per_image": 16, "boi_token_index": 5, "eoi_token_index": 6, "image_token_index": 4}
    return _model("Gemma3", vision_config=SIGLIP, text_config=text, **tokens)


def _gemma3_processor() -> Any:
    return _of("Gemma3Processor", _of("Gemma3ImageProcessor", size=SQUARE), new_tokenizer(), image_seq_length=16)


def _internvl() -> Any:
    vision = {**CLIP, "image_size": [64, 64], "patch_size": [8, 8]}
    text = {"model_type": "qwen2", **TEXT}
    return _model("InternVL", vision_config=vision, text_config=text, image_token_id=4, image_seq_length=16)


def _internvl_processor() -> Any:
    images = _of("GotOcr2ImageProcessor", size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    return _of("InternVLProcessor", images, new_tokenizer(), _of("InternVLVideoProcessor"), image_seq_length=16)


def _idefics(name: str) -> Any:
    return _model(name, vision_config=CLIP, text_config={**LLAMA, "pad_token_id": 0}, image_token_id=4)


def _idefics3_processor() -> Any:
    images = _of("Idefics3ImageProcessor", size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    return _of("Idefics3Processor", images, new_tokenizer(), image_seq_len=16)


def _smolvlm_processor() -> Any:
    from transformers.models.smolvlm import processing_smolvlm

    if not processing_smolvlm.num2words:  # a package that writes the number of a video's frames in words
        processing_smolvlm.num2words = str
    images = _of("SmolVLMImageProcessor", size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    videos = _of("SmolVLMVideoProcessor", size={"longest_edge": 64}, max_image_size={"longest_edge": 64})
    return _of("SmolVLMProcessor", images, new_tokenizer(), videos, image_seq_len=16)


def _qwen2() -> Any:
    vision = {"depth": 8, "embed_dim": 48, "hidden_size": 32, "num_heads": 3, "patch_size": 8, "mlp_ratio": 2}
    return _model("Qwen2VL", vision_config=vision, text_config=QWEN_TEXT, **QWEN_TOKENS)


def _qwen2_5() -> Any:
    vision = {**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [1, 3, 5, 7]}
    return _model("Qwen2_5_VL", vision_config=vision, text_config=QWEN_TEXT, **QWEN_TOKENS)


def _qwen3() -> Any:
    vision = {**QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [2, 5]}
    return _model("Qwen3VL", vision_config=vision, text_config={**QWEN_TEXT, "head_dim": 16}, **QWEN_TOKENS)


def _qwen_processor(name: str) -> Any:
    size = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    images = _of("Qwen2VLImageProcessor", patch_size=8, size=size)
    videos = _of("Qwen3VLVideoProcessor" if name == "Qwen3VLProcessor" else "Qwen2VLVideoProcessor", patch_size=8)
    return _of(name, images, new_tokenizer(), videos)


QWEN = [
    VLM("qwen2", _qwen2, lambda: _qwen_processor("Qwen2VLProcessor"), 16),
    VLM("qwen2_5", _qwen2_5, lambda: _qwen_processor("Qwen2_5_VLProcessor"), 16),
    VLM("qwen3", _qwen3, lambda: _qwen_processor("Qwen3VLProcessor"), 16),
]
VLMS = [
    VLM("llava", _llava, _llava_processor, 64, pointwise=True),
    VLM("vipllava", _vipllava, _llava_processor, 64, pointwise=True),
    VLM("paligemma", _paligemma, _paligemma_processor, 64, pointwise=True),
    VLM("gemma3", _gemma3, _gemma3_processor, 16, mark="<boi>", nested=True),
    VLM("internvl", _internvl, _internvl_processor, 16),
    VLM("idefics3", lambda: _idefics("Idefics3"), _idefics3_processor, 16, nested=True),
    VLM("smolvlm", lambda: _idefics("SmolVLM"), _smolvlm_processor, 16, nested=True),
    *QWEN,
]

every_vlm = pytest.mark.parametrize("vlm", VLMS, ids=lambda vlm: vlm.name)
