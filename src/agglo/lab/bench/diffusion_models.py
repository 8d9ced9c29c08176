"""The U-Nets that the diffusion benchmark times, with random weights, and the inputs they get."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import choice
from agglo.hosts.diffusers.families import Modules, family_of
from agglo.utils.randomness import generator

PIXELS = 8  # of the picture, per side of a latent's element
TEXT_TOKENS = 77
GUIDANCE = 7.5
DENOISING_STEPS = 50
_TRAINING_STEPS = 1000
_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}

# With torch's own initialisation the softmax is nearly flat (in Stable Diffusion 1.5's first block a query spreads over
# 95 % of the tokens), so that attention gives every token the same mean and no grouping could be wrong. Queries this
# many times as long spread over about a tenth.
QUERY_GAIN = 8.0

_COMMON: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "act_fn": "silu",
    "norm_eps": 1e-5,
    "center_input_sample": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "attention_head_dim": 8,  # heads, in spite of its name
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sd15": {
        **_COMMON,
        "block_out_channels": (320, 640, 1280, 1280),
        "layers_per_block": 2,
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "cross_attention_dim": 768,
        "norm_num_groups": 32,
    },
    "tiny": {
        **_COMMON,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "norm_num_groups": 8,
    },
}


def random_unet(architecture: str, side: int, seed: int, query_gain: float = QUERY_GAIN) -> Any:
    """A U-Net with random weights for latents of side x side. query_gain: of the queries of its self-attentions."""
    from diffusers import UNet2DConditionModel

    choice("architecture", architecture, ARCHITECTURES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet2DConditionModel(sample_size=side, **ARCHITECTURES[architecture]).eval().requires_grad_(False)
    for modules in self_attentions(model):
        for attention in modules.attentions:
            attention.to_q.weight.mul_(query_gain)  # type: ignore[operator,union-attr]
    return model


def self_attentions(model: nn.Module) -> list[Modules]:
    """All of a U-Net, in order."""
    family = family_of(model)
    assert family is not None
    return list(family.find(model))


def finest(model: nn.Module) -> list[Modules]:
    """The self-attentions that are reduced: those with the most tokens."""
    found = self_attentions(model)
    least = min(modules.site.downsample for modules in found)
    return [modules for modules in found if modules.site.downsample == least]


def sharing_weights(model: nn.Module) -> Any:
    """A model of its own to apply something to, whose weights are those of another."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


@dataclass(frozen=True)
class Call:
    """What the model is called with. sample: (B, 4, side, side), the first half without the prompt."""

    timestep: int
    sample: Tensor
    text: Tensor

    def predict(self, model: Any) -> Tensor:
        # By position: tomesd's hook looks for the sample there.
        predicted: Tensor = model(self.sample, self.timestep, encoder_hidden_states=self.text).sample
        return predicted


class Trajectory:
    """Successive steps of one generation with classifier-free guidance, driven by the dense model's predictions.

    Smooth random latents are noised to the level at which the steps begin. The scheduler is DDIM with Stable
    Diffusion's betas and 50 steps.

    batch: pictures of a call, those with and without the prompt together.
    part: 0 to 1, where in the generation the steps lie.
    """

    def __init__(self, model: Any, batch: int, steps: int, part: float, seed: int) -> None:
        from diffusers import DDIMScheduler

        self.scheduler = DDIMScheduler(num_train_timesteps=_TRAINING_STEPS, steps_offset=1, **_NOISE)
        self.scheduler.set_timesteps(DENOISING_STEPS)
        first = round(part * (DENOISING_STEPS - steps))
        self.timesteps = [int(t) for t in self.scheduler.timesteps[first : first + steps]]
        weight = model.conv_in.weight
        side, channels = model.config.sample_size, model.config.in_channels
        drawing = generator("diffusion benchmark", seed, part)
        coarse = torch.randn(batch // 2, channels, max(side // 4, 2), max(side // 4, 2), generator=drawing)
        clean = F.interpolate(coarse, size=(side, side), mode="bicubic")
        noise = torch.randn(clean.shape, generator=drawing)
        noisy = self.scheduler.add_noise(clean, noise, torch.tensor(self.timesteps[:1]))
        text = torch.randn(batch, TEXT_TOKENS, model.config.cross_attention_dim, generator=drawing)
        self.latents, self.text = noisy.to(weight), text.to(weight)

    def calls(self) -> Iterator[Call]:
        """One per step. Before the next one is asked for, `advance` must be told what the dense model predicted."""
        for timestep in self.timesteps:
            yield Call(timestep, torch.cat([self.latents, self.latents]), self.text)

    def advance(self, timestep: int, dense: Tensor) -> None:
        without, prompted = dense.chunk(2)
        guided = without + GUIDANCE * (prompted - without)
        self.latents = self.scheduler.step(guided, timestep, self.latents).prev_sample


def attended_share(model: Any, call: Call) -> float:
    """Over how many of the tokens the attention of the first reduced block spreads.

    The exponential of the entropy of a query's weights as a share of all tokens, mean over some queries and all heads.
    1 is a plain mean.
    """
    attention: Any = finest(model)[0].attentions[0]
    found: list[float] = []

    def look(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        tokens = arguments[0].float()
        some = tokens[:, :: max(1, tokens.shape[1] // 64)]
        weights = (attention.to_q.weight.float(), attention.to_k.weight.float())
        queries, keys = (
            (x @ weight.T).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
            for x, weight in zip((some, tokens), weights, strict=True)
        )
        logits = queries @ keys.transpose(-1, -2) * attention.scale
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        found.append(float(entropy.exp().mean() / tokens.shape[1]))

    hook = attention.register_forward_pre_hook(look)
    try:
        call.predict(model)
    finally:
        hook.remove()
    return found[0]
