"""Not in the paper: the options of merging in a real pretrained U-Net of 1024 tokens, by the error of its output.

The consistency model of the package adaptive-terrain-diffusion (MIT) makes height maps of 128 x 128 and is published as
an ONNX file. Its U-Net is guided diffusion's, which diffusers has as UNet2DModel: the weights are put there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch
from torch import Tensor, nn

from agglo.hosts.diffusers import generation
from agglo.lab.paper.compare import by_rate, grouped
from agglo.lab.paper.items.diffusion import reductions
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings
from agglo.lab.tasks.synthesis.evaluation.grid import GenerationCell, relative_errors
from agglo.patch import remove
from agglo.utils.randomness import generator as random_generator
from studies import study
from studies.diffusion import COMPARED, KEEP_RATES, Parts, cells_of, prediction_errors

Calls = Sequence[Callable[[], Tensor]]  # predictions of the model at several noise levels

WEIGHTS, ONE_CALL, OVER_STEPS = "terrain_consistency_unet_difficulty100", "one call", "successive steps"
IMAGES, SIZE, SIGMAS, STEPS = 4, 128, (0.2, 1.0, 5.0), 5
SIGMA_DATA, SIGMA_MIN, SIGMA_MAX = 0.5, 0.002, 80.0
NEEDS = (
    Need("weights", WEIGHTS, "the .onnx file in the package adaptive-terrain-diffusion"),
    *(Need("extra", name, "reads and checks that file") for name in ("onnx", "onnxruntime")),
)
SUCCESSIVE: dict[str, dict[str, Any]] = {
    "atc-average": {},
    "atc-average, shared by the blocks": {"share": "resolution"},
    "atc-average, kept for 5 steps": {"every": 5},
    "atc-average, shared by the blocks, kept for 5 steps": {"share": "resolution", "every": 5},
    **{f"atc-average, kept until they drift by {drift:g}": {"drift": drift} for drift in (0.05, 0.1, 0.2, 0.4)},
    "atc-average, windows of 8 x 8, kept for 5 steps": {"window": 8, "every": 5},
}
PARTS = {
    ONE_CALL: reductions({**COMPARED, "atc-average, windows of 16 x 16": {"window": 16}}, KEEP_RATES),
    OVER_STEPS: reductions(SUCCESSIVE, KEEP_RATES),
}
# Layers of a block in diffusers, and in guided diffusion.
_ATTENTION = {"group_norm": "norm", "to_q": "qkv", "to_k": "qkv", "to_v": "qkv", "to_out.0": "proj_out"}
_RESIDUAL = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1"}
_RESIDUAL |= {"norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
_ENDS = {"unet.time_embedding.linear_1": "time_embed.0", "unet.time_embedding.linear_2": "time_embed.2"}
_ENDS |= {"label.0": "label_emb.0", "label.2": "label_emb.2", "unet.conv_in": "input_blocks.0.0"}
_ENDS |= {"unet.conv_norm_out": "out.0", "unet.conv_out": "out.2"}


class Terrain(nn.Module):
    """The consistency model: (B, 1, 128, 128) noisy height maps, sigma (B,) and difficulty (B,) to clean ones."""

    def __init__(self) -> None:
        from diffusers import UNet2DModel

        super().__init__()
        self.unet = UNet2DModel(
            sample_size=SIZE,
            in_channels=1,
            out_channels=1,
            layers_per_block=4,
            block_out_channels=(32, 32, 64, 96, 128),
            down_block_types=("ResnetDownsampleBlock2D",) * 2 + ("AttnDownBlock2D",) * 3,
            up_block_types=("AttnUpBlock2D",) * 3 + ("ResnetUpsampleBlock2D",) * 2,
            downsample_type="resnet",
            upsample_type="resnet",
            resnet_time_scale_shift="scale_shift",
            attention_head_dim=32,
            attn_norm_num_groups=32,
            freq_shift=0,
            class_embed_type="identity",
        )
        self.label = nn.Sequential(nn.Linear(1, 128), nn.SiLU(), nn.Linear(128, 128))

    def predict(self, noisy: Tensor, sigma: Tensor, difficulty: Tensor) -> Any:
        """Return the output of the U-Net itself."""
        scaled = noisy / (sigma.square() + SIGMA_DATA**2).sqrt().view(-1, 1, 1, 1)
        return self.unet(scaled, 250.0 * sigma.log(), self.label(difficulty[:, None])).sample

    def forward(self, noisy: Tensor, sigma: Tensor, difficulty: Tensor) -> Tensor:
        above = sigma - SIGMA_MIN
        skip = SIGMA_DATA**2 / (above.square() + SIGMA_DATA**2)
        out = above * SIGMA_DATA / (sigma.square() + SIGMA_DATA**2).sqrt()
        predicted: Tensor = out.view(-1, 1, 1, 1) * self.predict(noisy, sigma, difficulty)
        return (predicted + skip.view(-1, 1, 1, 1) * noisy).clamp(-1, 1)


def theirs(name: str) -> str:
    """Return a layer's name in guided diffusion, which counts the blocks of all resolutions together.

    >>> theirs("unet.down_blocks.2.attentions.1.to_k"), theirs("unet.up_blocks.0.upsamplers.0.conv1")
    ('input_blocks.12.1.qkv', 'output_blocks.4.2.in_layers.2')
    """
    if name in _ENDS:
        return _ENDS[name]
    _, side, *place, kind, number, layer = re.split(r"\.", name, maxsplit=5 - ("mid_block" in name))
    layer = (_ATTENTION if kind == "attentions" else _RESIDUAL)[layer]
    if side == "mid_block":
        return f"middle_block.{1 if kind == 'attentions' else 2 * int(number)}.{layer}"
    level = int(place[0])
    if side == "down_blocks":
        block = 5 * level + (5 if kind == "downsamplers" else 1 + int(number))
        return f"input_blocks.{block}.{int(kind == 'attentions')}.{layer}"
    block = 5 * level + (4 if kind == "upsamplers" else int(number))
    inside = {"resnets": 0, "attentions": 1, "upsamplers": 2 if level < 3 else 1}[kind]
    return f"output_blocks.{block}.{inside}.{layer}"


def load(path: Path) -> Terrain:
    """Return the model with the weights of the file; refused where ONNX Runtime's output is another."""
    import onnxruntime

    model, weights = Terrain().eval(), read(path)
    state = {}
    for key, own in model.state_dict().items():
        name, _, end = key.rpartition(".")
        value = weights[f"{theirs(name)}.{end}"]
        if name[-5:] in (".to_q", ".to_k", ".to_v"):
            value = value.chunk(3)["qkv".index(name[-1])]
        state[key] = value.reshape(own.shape)  # a convolution of one position is a linear layer
    model.load_state_dict(state)
    noisy = torch.randn(1, 1, SIZE, SIZE, generator=random_generator("terrain")) * 5
    inputs = {"noisy": noisy, "sigma": torch.tensor([5.0]), "difficulty": torch.tensor([0.5])}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs), torch.from_numpy(expected), rtol=0, atol=1e-3)
    return model


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


@torch.no_grad()
def _run(parts: Parts, settings: Settings) -> RunCell:
    model = load(settings.weights[WEIGHTS])
    difficulty, most = torch.linspace(0.1, 0.9, IMAGES), torch.full((IMAGES,), SIGMA_MAX)
    shape = (IMAGES, 1, SIZE, SIZE)
    clean = model(torch.randn(shape, generator=random_generator("terrains", IMAGES)) * SIGMA_MAX, most, difficulty)
    schedule = (np.linspace(SIGMA_MAX ** (1 / 7), SIGMA_MIN ** (1 / 7), 50) ** 7).tolist()  # Karras et al. 2022
    calls, paths = [], []
    for level in SIGMAS:
        noisy = clean + level * torch.randn(shape, generator=random_generator("terrain noise", level))
        calls.append(partial(model.predict, noisy, torch.full((IMAGES,), level), difficulty))
        start = next(number for number, sigma in enumerate(schedule) if sigma <= level)
        paths.append(successive(model, clean, difficulty, schedule[start : start + STEPS + 1]))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        cell = parts[about["part"]][about["method"], about["keep_rate"]]
        if about["part"] == OVER_STEPS:
            errors, clusterings = errors_over_steps(model, cell, paths)
            found = {"clusterings": clusterings}
        else:
            errors, found = prediction_errors(model, cell, calls), {}
        return {"error": mean(errors), "by_level": errors, **found, "images": IMAGES, "sigmas": SIGMAS}

    return run


@torch.no_grad()
def successive(model: Terrain, clean: Tensor, difficulty: Tensor, sigmas: Sequence[float]) -> Calls:
    """Return calls of the model at all noise levels but the last, on the path of the dense model's Euler steps."""
    noisy = clean + sigmas[0] * torch.randn(clean.shape, generator=random_generator("terrain steps", sigmas[0]))
    calls = []
    for sigma, following in pairwise(sigmas):
        level = torch.full((len(clean),), sigma)
        calls.append(partial(model.predict, noisy, level, difficulty))
        denoised = model(noisy, level, difficulty)
        noisy = denoised + following / sigma * (noisy - denoised)
    return calls


@torch.no_grad()
def errors_over_steps(model: Terrain, cell: GenerationCell, paths: Sequence[Calls]) -> tuple[list[float], float]:
    """Return the mean relative error of each path, which is one generation, and clusterings per step."""
    remove(model)
    dense = [[call() for call in path] for path in paths]
    cell.apply(model)
    method: Any = model.unet.agglo_applied.method
    errors = []
    with patch.object(method, "reduce", Mock(wraps=method.reduce)) as counting:
        for path, right in zip(paths, dense, strict=True):
            with generation():
                steps = [relative_errors(call(), there).mean() for call, there in zip(path, right, strict=True)]
            errors.append(float(torch.stack(steps).mean()))
    return errors, counting.call_count / sum(map(len, paths))


def _table(results: Sequence[Result], parts: Parts) -> list[Section]:
    sections = []
    for (part,), here in grouped(results, "part").items():
        title, text = "Relative error of the U-Net's output (%)", "{images} height maps, mean over sigma 0.2, 1, 5."
        if part == OVER_STEPS:
            title = "Groups that are kept or shared"
            text = "Mean of 5 successive steps from each sigma on (of 50 in all), %; clusterings per step in brackets."
        sections.append(Section(title, by_rate(here, _entry), text.format(images=here[0]["images"])))
    return sections


def _entry(result: Result) -> str:
    error = 100 * result["error"]
    return f"{error:.2f} ({result['clusterings']:.1f})" if result["part"] == OVER_STEPS else f"{error:.1f}"


ITEMS = (
    study(
        name="terrain",
        about="Relative error of a real pretrained U-Net's output (height maps, 1024 tokens), for every option of "
        "merging: single calls at three noise levels, and five successive steps with groups kept or shared",
        full=PARTS,
        miniature=None,
        axes=lambda parts, settings: cells_of(parts, *NEEDS),
        run=_run,
        table=_table,
    ),
)
