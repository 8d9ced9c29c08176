"""The embedded generator: a small class-conditional diffusion transformer for Fashion-MNIST, of diffusers' own class.

It works on pixels: images are padded from 28 to 32 pixels, and patches of 2 x 2 make 16 x 16 = 256 tokens. It predicts
the velocity v of a cosine noise schedule, and knows an eleventh class, "any", for classifier-free guidance. Its weights
are part of the package, trained by `agglo train-generator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.hosts.diffusers import generation

NAME = "agglo_fashion_dit"
WEIGHTS = Path(__file__).with_name("agglo_fashion_dit.safetensors")
N_CLASSES = 10
ANY_CLASS = N_CLASSES
IMAGE_SIZE, PADDING = 28, 2

SHAPE: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 8,
    "sample_size": IMAGE_SIZE + 2 * PADDING,
    "patch_size": 2,
    "num_embeds_ada_norm": N_CLASSES,
}
NOISE: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
}


def untrained(**options: Any) -> nn.Module:
    """Build the model before training, with options in place of those of SHAPE; every block begins as the identity."""
    from diffusers import DiTTransformer2DModel

    model: nn.Module = DiTTransformer2DModel(**{**SHAPE, **options})
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    blocks: Any = model.transformer_blocks
    for block in blocks:
        nn.init.normal_(block.norm1.emb.class_embedder.embedding_table.weight, std=0.02)
        nn.init.zeros_(block.norm1.linear.weight)
        # Every block has a class embedding of its own, which would forget the class when others do not.
        # Training says itself which images have no class.
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    for name in ("proj_out_1", "proj_out_2"):
        nn.init.zeros_(getattr(model, name).weight)
    return model


def trained(weights: Path = WEIGHTS) -> nn.Module:
    """Load the generator with its weights, or those of a run of `agglo train-generator`, in float32, for evaluation."""
    from safetensors.torch import load_file

    if not weights.is_file():
        raise ValueError(f"weights={str(weights)!r} is not a file; `agglo train-generator` makes one")
    model = untrained()
    model.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    return model.eval()


def to_model(images: Tensor) -> Tensor:
    """Return grey images (B, 1, 28, 28), uint8, as the model takes them: (B, 1, 32, 32) in -1 to 1, black around."""
    padded = nn.functional.pad(images, (PADDING,) * 4)
    return padded.to(torch.float32) / 127.5 - 1.0


@torch.no_grad()
def sample(
    model: nn.Module,
    classes: Sequence[int],
    seeds: Sequence[int],
    *,
    steps: int = 25,
    guidance: float = 1.0,
    after_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Return images (B, 1, 28, 28), uint8, of a class and a seed each, by DDIM without further noise.

    Args:
        guidance: How much of the difference that the class makes is taken; 1 runs the model without the class "any".
        after_step: Called with the number of steps done.
    """
    from diffusers import DDIMScheduler

    if len(classes) != len(seeds):
        raise ValueError(f"{len(classes)} classes and {len(seeds)} seeds: one of each for every image is accepted")
    parameter = next(model.parameters())
    scheduler = DDIMScheduler(**NOISE, timestep_spacing="trailing", clip_sample=True)
    scheduler.set_timesteps(steps)
    shape = (1, SHAPE["sample_size"], SHAPE["sample_size"])
    # Each image's noise is from its own seed: the same in any batch and on any device.
    noises = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    noisy = torch.stack(noises).to(parameter.device)
    labels = torch.tensor(classes, device=parameter.device)
    guided = guidance != 1.0
    if guided:
        labels = torch.cat([torch.full_like(labels, ANY_CLASS), labels])
    with generation():
        for number, step in enumerate(scheduler.timesteps, start=1):
            inputs = (torch.cat([noisy, noisy]) if guided else noisy).to(parameter.dtype)
            times = step.to(parameter.device).expand(len(inputs))
            velocity = model(inputs, times, labels).sample.float()
            if guided:
                free, prompted = velocity.chunk(2)
                velocity = free + guidance * (prompted - free)
            noisy = scheduler.step(velocity, step, noisy).prev_sample
            if after_step is not None:
                after_step(number)
    inner = noisy[..., PADDING:-PADDING, PADDING:-PADDING]
    return ((inner.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
