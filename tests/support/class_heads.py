"""Small models whose heads read the class token alone, of every library, and the FLOPs that a call really runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

Builder = Callable[[], nn.Module]


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 7}


def made(module: str, maker: str, *arguments: Any, **options: Any) -> Any:
    """What a class or function of a library makes; the test is skipped without the library."""
    pytest.importorskip(module.partition(".")[0])
    return getattr(importlib.import_module(module), maker)(*arguments, **options)


timm_model = partial(made, "timm.models.vision_transformer", "VisionTransformer", **SMALL)
distilled = partial(made, "timm", "create_model", "deit_tiny_distilled_patch16_224", **SMALL)
eva = partial(made, "timm.models.eva", "Eva", **SMALL, global_pool="token")
torchvision_model = partial(
    made, "torchvision.models.vision_transformer", "VisionTransformer", 32, 8, 4, 3, 48, 96, num_classes=7
)
TOWER = {"image_size": 32, "patch_size": 8, "width": 48, "layers": 4, "heads": 3, "mlp_ratio": 2.0, "output_dim": 7}
open_clip_tower = partial(made, "open_clip.transformer", "VisionTransformer", **TOWER)


def gated() -> nn.Module:
    model = eva(use_rot_pos_emb=True)
    for block in model.blocks:
        block.attn.gate = nn.Linear(48, 48)
    return model  # type: ignore[no-any-return]


def post_norm() -> nn.Module:
    vit = pytest.importorskip("timm.models.vision_transformer")
    return timm_model(block_fn=vit.ResPostBlock, init_values=0.5)


def transformers_model(kind: str, **options: Any) -> nn.Module:
    tf = pytest.importorskip("transformers")
    config = getattr(tf, "DeiTConfig" if kind.startswith("DeiT") else "ViTConfig")(
        image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=4, num_attention_heads=3, intermediate_size=96,
        num_labels=7, **options,
    )  # fmt: skip
    return getattr(tf, kind)(config)  # type: ignore[no-any-return]


def open_clip_model() -> nn.Module:
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "patch_size": 8, "width": 48, "head_width": 16, "layers": 4, "mlp_ratio": 2.0}
    words = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 1}

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = open_clip.CLIP(embed_dim=7, vision_cfg=vision, text_cfg=words)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.clip.encode_image(x)
            return out

    return Images()


CUSTOM = dict.fromkeys(("qk_norm", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc"), True)
ONE_OF_EACH: dict[str, Builder] = {
    "timm": timm_model,
    "torchvision": torchvision_model,
    "transformers": lambda: transformers_model("ViTForImageClassification"),
    "open_clip": open_clip_tower,
}
MODELS: dict[str, Builder] = {
    **ONE_OF_EACH,
    "timm distilled": distilled,
    "timm qk_norm": lambda: timm_model(qk_norm=True, init_values=0.5, pre_norm=True),
    "timm post norm": post_norm,
    "eva-02": lambda: eva(use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True, qkv_fused=False),
    "eva mixed": lambda: eva(attn_type="rope", use_rot_pos_emb=True, rope_type="mixed", init_values=0.1),
    "eva grouped": lambda: eva(attn_type="rope", use_rot_pos_emb=True, qkv_fused=False, num_kv_heads=1, qk_norm=True),
    "eva gated": gated,
    "transformers teacher": lambda: transformers_model("DeiTForImageClassificationWithTeacher"),
    "open_clip custom": lambda: open_clip_tower(**CUSTOM, ls_init_value=0.3),
    "CLIP": open_clip_model,
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def counted_flops(model: nn.Module, x: Tensor) -> float:
    """FLOPs that really run for each image of x, attention written out as matrix products."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        model(x)
    return float(counter.get_total_flops()) / len(x)
