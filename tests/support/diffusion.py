"""Tiny diffusion models with random weights, one of each kind, and inputs for them."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods import Method, Outcome, View

diffusers = pytest.importorskip("diffusers")

Inputs = dict[str, Any]
TEXT = 5  # text tokens


def unet(size: tuple[int, int] = (8, 8), batch: int = 2, **config: Any) -> tuple[Any, Inputs]:
    defaults = {
        "sample_size": 8, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2,
        "cross_attention_dim": 12, "attention_head_dim": 2,
    }  # fmt: skip
    model = _seeded("UNet2DConditionModel", **{**defaults, **config})
    sample = torch.randn(batch, model.config.in_channels, *size)
    return model, {"sample": sample, "timestep": torch.tensor(500), "encoder_hidden_states": _text(batch)}


def _seeded(kind: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**config).eval()


def _text(batch: int = 2) -> Tensor:
    return torch.randn(batch, TEXT, 12)


def unet_of_maps(
    down: tuple[str, ...] = ("AttnDownBlock2D",) * 2, up: tuple[str, ...] = ("AttnUpBlock2D",) * 2
) -> tuple[Any, Inputs]:
    model = _seeded(
        "UNet2DModel", sample_size=8, layers_per_block=1, block_out_channels=(16, 32)[: len(down)], norm_num_groups=8,
        attention_head_dim=8, down_block_types=down, up_block_types=up, mid_block_scale_factor=1.5,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor(500)}


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


def dit(**config: Any) -> tuple[Any, Inputs]:
    defaults = {"num_layers": 2, "sample_size": 16, "num_embeds_ada_norm": 10, "norm_num_groups": 8}
    model = _seeded("DiTTransformer2DModel", **{**HEADS, **defaults, **config})
    latents, timestep = torch.randn(2, 4, 16, 16), torch.tensor([500, 500])
    return model, {"hidden_states": latents, "timestep": timestep, "class_labels": torch.tensor([1, 2])}


def pixart() -> tuple[Any, Inputs]:
    model = _seeded(
        "PixArtTransformer2DModel", **HEADS, num_layers=2, cross_attention_dim=32, sample_size=16, caption_channels=12,
        use_additional_conditions=False,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(2, 4, 16, 12), "timestep": torch.tensor([500, 500])}
    conditions = {"resolution": None, "aspect_ratio": None}
    return model, {**inputs, "encoder_hidden_states": _text(), "added_cond_kwargs": conditions}


def sd3() -> tuple[Any, Inputs]:
    model = _seeded(
        "SD3Transformer2DModel", **HEADS, sample_size=16, in_channels=4, out_channels=4, num_layers=3,
        joint_attention_dim=12, caption_projection_dim=32, pooled_projection_dim=20, dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(2, 4, 16, 12), "timestep": torch.tensor([500, 500])}
    return model, {**inputs, "encoder_hidden_states": _text(), "pooled_projections": torch.randn(2, 20)}


def flux() -> tuple[Any, Inputs]:
    model = _seeded(
        "FluxTransformer2DModel", **HEADS, in_channels=8, num_layers=1, num_single_layers=2, joint_attention_dim=12,
        pooled_projection_dim=20, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 48, 8),
        "timestep": torch.tensor([0.5, 0.5]),
        "encoder_hidden_states": _text(),
        "pooled_projections": torch.randn(2, 20),
        "img_ids": torch.cartesian_prod(torch.tensor([0.0]), torch.arange(8.0), torch.arange(6.0)),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def wan() -> tuple[Any, Inputs]:
    model = _seeded(
        "WanTransformer3DModel", num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=12, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(2, 4, 3, 8, 12), "timestep": torch.tensor([500, 500])}
    return model, {**inputs, "encoder_hidden_states": _text()}


def ltx() -> tuple[Any, Inputs]:
    model = _seeded(
        "LTXVideoTransformer3DModel", **HEADS, in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=2,
        caption_channels=12,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(2, 48, 4), "timestep": torch.tensor([500, 500])}
    text = {"encoder_hidden_states": _text(), "encoder_attention_mask": torch.ones(2, TEXT)}
    return model, {**inputs, **text, "num_frames": 2, "height": 4, "width": 6}


MODELS: dict[str, Callable[..., tuple[Any, Inputs]]] = {
    made.__name__: made for made in (unet, unet_of_maps, dit, pixart, sd3, flux, wan, ltx)
}


class Whole(Method):
    """Nothing merges, but everything goes the way of merged tokens: the groups are the tokens in another order."""

    name = "whole"

    def stages(self, n_tokens: int, asked: Any, grid: Any) -> list[int]:
        return [n_tokens + 1]  # not the number of tokens, which would be left alone

    def reduce(self, view: View) -> Outcome:
        batch, n_tokens, _ = view.tokens.shape
        assert view.grid is not None
        assert view.grid[0] * view.grid[1] == n_tokens
        order = torch.stack([torch.randperm(n_tokens) for _ in range(batch)])
        return Outcome(Grouping.of(order, n_tokens))


def run(model: Any, inputs: Inputs, **other: Any) -> Tensor:
    """The model's prediction. Its first argument goes by position, as pipelines do it."""
    (_, first), *rest = {**inputs, **other}.items()
    with torch.no_grad():
        result: Tensor = model(first, **dict(rest)).sample
    return result


def vae() -> Any:
    return _seeded(
        "AutoencoderKL", block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def pipeline(kind: str = "StableDiffusionPipeline", **config: Any) -> Any:
    """A Stable Diffusion pipeline whose prompts are given as embeddings; images are twice as large as latents."""
    model, _ = unet(**config)
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    pipe = getattr(diffusers, kind)(vae(), None, None, model, scheduler, None, None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, steps: int = 4, seed: int = 0, **other: Any) -> Tensor:
    """Latents of one image made with guidance, so that the model runs with batches of two."""
    given = torch.Generator().manual_seed(seed)
    options = other if "image" in other else {"height": 16, "width": 16, **other}
    result: Tensor = pipe(
        prompt_embeds=torch.randn(1, TEXT, 12, generator=given),
        negative_prompt_embeds=torch.zeros(1, TEXT, 12),
        num_inference_steps=steps,
        generator=given,
        output_type="latent",
        **options,
    ).images
    return result


def save_dit_pipeline(folder: Path) -> Path:
    """A DiT pipeline of random weights and 1000 classes, as diffusers saves it; images of 16 x 16."""
    transformer, _ = dit(attention_head_dim=8, out_channels=8, sample_size=8, num_embeds_ada_norm=1000)
    diffusers.DiTPipeline(transformer, vae(), diffusers.DDIMScheduler()).save_pretrained(folder)
    return folder


def save_prompted_pipeline(folder: Path) -> Path:
    """A Stable Diffusion pipeline of random weights that reads prompts letter by letter, as diffusers saves it."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [letter + end for letter in string.ascii_lowercase + ".," for end in ("", "</w>")]
    vocabulary = {word: index for index, word in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=len(vocabulary), hidden_size=12, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=len(vocabulary) - 2, eos_token_id=len(vocabulary) - 1,
    )  # fmt: skip
    model, _ = unet()
    pipe = diffusers.StableDiffusionPipeline(
        vae(), CLIPTextModel(config), tokenizer, model, diffusers.PNDMScheduler(skip_prk_steps=True), None, None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipe.save_pretrained(folder / "pipeline")
    return folder / "pipeline"
