"""A real pretrained U-Net with 1024 tokens: the consistency model of the package adaptive-terrain-diffusion (MIT).

It makes height maps of 128 x 128 and is published as an ONNX file. Its U-Net is that of guided diffusion, which
diffusers has as UNet2DModel: the weights are read from the file and put there. Self-attention at 32 x 32, 16 x 16 and
8 x 8 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from agglo.utils.randomness import generator as random_generator

SIZE, LAYERS, CHANNELS = 128, 4, (32, 32, 64, 96, 128)
SIGMA_DATA, SIGMA_MIN, SIGMA_MAX = 0.5, 0.002, 80.0


class Terrain(nn.Module):
    """The consistency model: (B, 1, 128, 128) noisy height maps, sigma (B,) and difficulty (B,) to clean ones."""

    def __init__(self) -> None:
        from diffusers import UNet2DModel

        super().__init__()
        attended = ("AttnDownBlock2D",) * 3
        self.unet = UNet2DModel(
            sample_size=SIZE,
            in_channels=1,
            out_channels=1,
            layers_per_block=LAYERS,
            block_out_channels=CHANNELS,
            down_block_types=("ResnetDownsampleBlock2D",) * 2 + attended,
            up_block_types=("AttnUpBlock2D",) * 3 + ("ResnetUpsampleBlock2D",) * 2,
            downsample_type="resnet",
            upsample_type="resnet",
            resnet_time_scale_shift="scale_shift",
            attention_head_dim=32,
            norm_num_groups=32,
            attn_norm_num_groups=32,
            norm_eps=1e-5,
            freq_shift=0,
            flip_sin_to_cos=True,
            class_embed_type="identity",
        )
        self.label = nn.Sequential(nn.Linear(1, 128), nn.SiLU(), nn.Linear(128, 128))

    def predict(self, noisy: Tensor, sigma: Tensor, difficulty: Tensor) -> Tensor:
        """Return the output of the U-Net itself."""
        scaled = noisy / (sigma.square() + SIGMA_DATA**2).sqrt().view(-1, 1, 1, 1)
        prediction: Tensor = self.unet(scaled, 250.0 * sigma.log(), self.label(difficulty[:, None])).sample
        return prediction

    def forward(self, noisy: Tensor, sigma: Tensor, difficulty: Tensor) -> Tensor:
        above = sigma - SIGMA_MIN
        skip = SIGMA_DATA**2 / (above.square() + SIGMA_DATA**2)
        out = above * SIGMA_DATA / (sigma.square() + SIGMA_DATA**2).sqrt()
        predicted = self.predict(noisy, sigma, difficulty)
        return (out.view(-1, 1, 1, 1) * predicted + skip.view(-1, 1, 1, 1) * noisy).clamp(-1, 1)


def load(path: Path) -> Terrain:
    """Return the model with the weights of the package's ONNX file."""
    weights = read(path)
    state: dict[str, Tensor] = {}
    for name, theirs in layer_names().items():
        for end in ("weight", "bias"):
            value = weights.pop(f"{theirs}.{end}", None)
            if value is None:
                continue
            if theirs.endswith(("qkv", "proj_out")) and end == "weight":
                value = value.flatten(1)  # a convolution of one position is a linear layer
            if theirs.endswith("qkv"):
                state |= {f"{name}.to_{which}.{end}": part for which, part in zip("qkv", value.chunk(3), strict=True)}
            else:
                state[f"{name}.{end}"] = value
    if weights:
        raise ValueError(f"{str(path)!r} holds weights that have no place: {', '.join(sorted(weights)[:5])}")
    model = Terrain()
    model.load_state_dict(state)
    return model.eval()


def read(path: Path) -> dict[str, Tensor]:
    """Return the file's weights by their names in guided diffusion.

    Those of norms have lost theirs: each belongs to the convolution that reads it next.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    constants = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    found = {name.removeprefix("network."): value for name, value in constants.items() if name.startswith("network.")}
    norm: list[Tensor] = []
    for node in graph.node:
        given = [constants[name] for name in node.input if name in constants]
        if node.op_type == "InstanceNormalization":
            norm = []
        elif node.op_type in ("Mul", "Add") and len(norm) < 2 and given and given[0].dim() == 3:
            norm.append(given[0].flatten())
        elif node.op_type == "Conv":
            name = node.input[1].removeprefix("network.").removesuffix(".weight")
            before = re.sub(r"(in_layers|out)\.2$", r"\1.0", name)
            before = re.sub(r"out_layers\.3$", "out_layers.0", re.sub(r"qkv$", "norm", before))
            if before != name:
                found[f"{before}.weight"], found[f"{before}.bias"] = norm
    return found


def layer_names() -> dict[str, str]:
    """Return every layer's name in guided diffusion by its name in diffusers."""
    found = {
        "unet.time_embedding.linear_1": "time_embed.0",
        "unet.time_embedding.linear_2": "time_embed.2",
        "label.0": "label_emb.0",
        "label.2": "label_emb.2",
        "unet.conv_in": "input_blocks.0.0",
        "unet.conv_norm_out": "out.0",
        "unet.conv_out": "out.2",
    }
    for ours, theirs in _block_names():
        layers = _ATTENTION if ".attentions." in ours else _RESIDUAL
        found |= {f"unet.{ours}{own}": f"{theirs}.{other}" for own, other in layers.items()}
    return found


_ATTENTION = {".group_norm": "norm", "": "qkv", ".to_out.0": "proj_out"}
_RESIDUAL = {
    ".norm1": "in_layers.0",
    ".conv1": "in_layers.2",
    ".time_emb_proj": "emb_layers.1",
    ".norm2": "out_layers.0",
    ".conv2": "out_layers.3",
    ".conv_shortcut": "skip_connection",
}


def _block_names() -> Iterator[tuple[str, str]]:
    """Yield blocks: guided diffusion counts all of the way down or up, diffusers those of each resolution."""
    for number, layer in enumerate(("resnets.0", "attentions.0", "resnets.1")):
        yield f"mid_block.{layer}", f"middle_block.{number}"
    last, down, up = len(CHANNELS) - 1, 0, -1
    for level in range(len(CHANNELS)):
        for layer in range(LAYERS):
            down += 1
            yield f"down_blocks.{level}.resnets.{layer}", f"input_blocks.{down}.0"
            if level >= 2:
                yield f"down_blocks.{level}.attentions.{layer}", f"input_blocks.{down}.1"
        if level < last:
            down += 1
            yield f"down_blocks.{level}.downsamplers.0", f"input_blocks.{down}.0"
        attended = level < 3
        for layer in range(LAYERS + 1):
            up += 1
            yield f"up_blocks.{level}.resnets.{layer}", f"output_blocks.{up}.0"
            if attended:
                yield f"up_blocks.{level}.attentions.{layer}", f"output_blocks.{up}.1"
        if level < last:
            yield f"up_blocks.{level}.upsamplers.0", f"output_blocks.{up}.{2 if attended else 1}"


def difference_to_onnx(model: Terrain, path: Path) -> float:
    """Return the largest difference, of height maps in -1 to 1."""
    import onnxruntime

    noisy = torch.randn(1, 1, SIZE, SIZE, generator=random_generator("terrain")) * 5
    sigma, difficulty = torch.tensor([5.0]), torch.tensor([0.5])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {"noisy": noisy.numpy(), "sigma": sigma.numpy(), "difficulty": difficulty.numpy()}
    theirs = session.run(None, inputs)[0]
    with torch.no_grad():
        return float(np.abs(model(noisy, sigma, difficulty).numpy() - theirs).max())


@torch.no_grad()
def terrains(model: Terrain, count: int) -> tuple[Tensor, Tensor]:
    """Return height maps that the model makes in its one step, and their difficulties."""
    difficulty = torch.linspace(0.1, 0.9, count)
    noise = torch.randn(count, 1, SIZE, SIZE, generator=random_generator("terrains", count)) * SIGMA_MAX
    return model(noise, torch.full((count,), SIGMA_MAX), difficulty), difficulty


def prediction(model: Terrain, clean: Tensor, difficulty: Tensor, level: float) -> Callable[[], Tensor]:
    noise = torch.randn(clean.shape, generator=random_generator("terrain noise", level))
    sigma = torch.full((len(clean),), level)
    return lambda: model.predict(clean + level * noise, sigma, difficulty)
