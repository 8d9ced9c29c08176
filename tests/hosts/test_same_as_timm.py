"""ATC on the same weights gives the same groups in every library as in timm, whose oracle is scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.testing import assert_same, tensors
from tests.support.class_heads import made, open_clip_tower

timm_vit = pytest.importorskip("timm.models.vision_transformer")

IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Twin:
    """A library's model, how timm names its weights, what timm's model has besides, and how both are reduced."""

    build: Callable[[], nn.Module]
    names: dict[str, str]
    options: dict[str, Any]
    reduction: dict[str, Any]


torchvision = partial(
    made, "torchvision.models.vision_transformer", "VisionTransformer", 64, 8, 12, 3, 48, 96, num_classes=10
)
open_clip = partial(open_clip_tower, image_size=64, layers=12, output_dim=10)


def transformers() -> nn.Module:
    library = pytest.importorskip("transformers")
    config = library.ViTConfig(
        image_size=64, patch_size=8, hidden_size=48, num_hidden_layers=12, num_attention_heads=3, intermediate_size=96,
        num_labels=10, layer_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    return library.ViTForImageClassification(config)  # type: ignore[no-any-return]


TWINS = {
    "torchvision": Twin(
        torchvision,
        {
            "conv_proj": "patch_embed.proj", "class_token": "cls_token", "encoder.pos_embedding": "pos_embed",
            "encoder.layers.encoder_layer_": "blocks.", "encoder.ln": "norm", "ln_1": "norm1", "ln_2": "norm2",
            "self_attention.in_proj_": "attn.qkv.", "self_attention.out_proj": "attn.proj", "mlp.0": "mlp.fc1",
            "mlp.3": "mlp.fc2", "heads.head": "head",
        },
        {},
        {"schedule": agglo.Linear(4), "proportional": False, "linkage": "single", "features": "tokens"},
    ),
    "open_clip": Twin(
        open_clip,
        {
            "class_embedding": "cls_token", "positional_embedding": "pos_embed", "conv1": "patch_embed.proj",
            "ln_pre": "norm_pre", "ln_post": "norm", "transformer.resblocks": "blocks", "ln_1": "norm1",
            "ln_2": "norm2", "in_proj_": "qkv.", "out_proj": "proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
        },
        {"pre_norm": True, "norm_layer": nn.LayerNorm},
        {"threshold": 0.4},
    ),
    "transformers": Twin(
        transformers,
        {
            "vit.embeddings.cls_token": "cls_token", "vit.embeddings.position_embeddings": "pos_embed",
            "vit.embeddings.patch_embeddings.projection": "patch_embed.proj", "vit.layers.": "blocks.",
            "vit.layernorm": "norm", "layernorm_before": "norm1", "layernorm_after": "norm2",
            "attention.q_proj": "attn.qkv", "attention.o_proj": "attn.proj", "classifier": "head",
        },
        {},
        {"keep_rate": 0.5},
    ),
}  # fmt: skip


def timm_weights(model: nn.Module, names: dict[str, str]) -> dict[str, Tensor]:
    state, renamed = model.state_dict(), {}
    for name, tensor in state.items():
        if ".k_proj" in name or ".v_proj" in name:
            continue
        if ".q_proj" in name:
            tensor = torch.cat([state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor.reshape(1, -1, 48) if name in ("cls_token", "pos_embed") else tensor
    if "proj" in renamed:  # open_clip's head is a matrix
        renamed |= {"head.weight": renamed.pop("proj").T, "head.bias": torch.zeros(10)}
    return renamed


@pytest.mark.parametrize("library", TWINS)
@torch.no_grad()
def test_equals_the_timm_host_on_the_same_weights(library: str) -> None:
    twin = TWINS[library]
    torch.manual_seed(0)
    model = twin.build().eval()
    for parameter in model.parameters():  # initialised so small that most keys are alike
        parameter.add_(torch.randn(parameter.shape) * 0.05)
    small = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 12, "num_heads": 3, "num_classes": 10}
    timm = timm_vit.VisionTransformer(**small, mlp_ratio=2, **twin.options).eval()
    timm.load_state_dict(timm_weights(model, twin.names), strict=True)
    dense = tensors(model(IMAGE))
    assert_same(dense, timm(IMAGE), atol=1e-4)
    for each in (model, timm):
        agglo.apply(each, **twin.reduction)
    with agglo.trace(model) as trace, agglo.trace(timm) as timm_trace:
        outputs = tensors(model(IMAGE))
        assert_same(outputs, timm(IMAGE), atol=1e-4)
    assert not torch.allclose(outputs[0], dense[0], atol=1e-3)
    for block, grouping in trace.groupings.items():
        assert torch.equal(grouping.labels, timm_trace.groupings[block].labels)
