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
    torch.manual_seed(0)
    defaults = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 12,
        "attention_head_dim": 2,
    }
    model = diffusers.UNet2DConditionModel(**{**defaults, **config}).eval()
    return model, {
        "sample": torch.randn(batch, model.config.in_channels, *size),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(batch, TEXT, 12),
    }


def unet_of_maps(size: tuple[int, int] = (8, 8)) -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D"),
        mid_block_scale_factor=1.5,
    ).eval()
    return model, {"sample": torch.randn(2, 3, *size), "timestep": torch.tensor(500)}


def dit() -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=8,
    ).eval()
    return model, {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([500, 500]),
        "class_labels": torch.tensor([1, 2]),
    }


def pixart() -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=16,
        caption_channels=12,
        use_additional_conditions=False,
    ).eval()
    return model, {
        "hidden_states": torch.randn(2, 4, 16, 12),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, TEXT, 12),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sd3() -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).eval()
    return model, {
        "hidden_states": torch.randn(2, 4, 16, 12),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, TEXT, 12),
        "pooled_projections": torch.randn(2, 20),
    }


def flux() -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=20,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    return model, {
        "hidden_states": torch.randn(2, 48, 8),
        "timestep": torch.tensor([0.5, 0.5]),
        "encoder_hidden_states": torch.randn(2, TEXT, 12),
        "pooled_projections": torch.randn(2, 20),
        "img_ids": torch.cartesian_prod(torch.tensor([0.0]), torch.arange(8.0), torch.arange(6.0)),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def wan() -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    ).eval()
    return model, {
        "hidden_states": torch.randn(2, 4, 3, 8, 12),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, TEXT, 12),
    }


def ltx() -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=12,
    ).eval()
    return model, {
        "hidden_states": torch.randn(2, 48, 4),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, TEXT, 12),
        "encoder_attention_mask": torch.ones(2, TEXT),
        "num_frames": 2,
        "height": 4,
        "width": 6,
    }


MODELS: dict[str, Callable[[], tuple[Any, Inputs]]] = {
    "unet": unet,
    "unet_of_maps": unet_of_maps,
    "dit": dit,
    "pixart": pixart,
    "sd3": sd3,
    "flux": flux,
    "wan": wan,
    "ltx": ltx,
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
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
    ).eval()


def pipeline(kind: str = "StableDiffusionPipeline", **config: Any) -> Any:
    """A Stable Diffusion pipeline whose prompts are given as embeddings; pictures are twice as large as latents."""
    model, _ = unet(**config)
    pipe = getattr(diffusers, kind)(
        vae=vae(),
        text_encoder=None,
        tokenizer=None,
        unet=model,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, steps: int = 4, seed: int = 0, **other: Any) -> Tensor:
    """Latents of one picture made with guidance, so that the model runs with batches of two."""
    given = torch.Generator().manual_seed(seed)
    options = {"height": 16, "width": 16, **other}
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
    """A DiT pipeline of random weights and 1000 classes, as diffusers saves it; pictures of 16 x 16."""
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    coder = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    diffusers.DiTPipeline(transformer, coder, diffusers.DDIMScheduler()).save_pretrained(folder)
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
        vocab_size=len(vocabulary),
        hidden_size=12,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
    )
    model, _ = unet()
    pipe = diffusers.StableDiffusionPipeline(
        vae(), CLIPTextModel(config), tokenizer, model, diffusers.PNDMScheduler(skip_prk_steps=True), None, None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipe.save_pretrained(folder / "pipeline")
    return folder / "pipeline"
