"""A small ViTAdapter with weights that matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

WIDTH, DEPTH, PATCH = 24, 8, 8


def small_vit(**options: Any) -> nn.Module:
    """Patches of 8 x 8, an 8 x 8 grid, 8 blocks."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    shape = {"img_size": 64, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 3, "num_classes": 5}
    model: nn.Module = timm.VisionTransformer(**{**shape, **options})
    return model


def rotary_vit(**options: Any) -> nn.Module:
    """The same with two registers and rotary positions."""
    eva = pytest.importorskip("timm.models.eva")
    shape = {"img_size": 64, "patch_size": PATCH, "embed_dim": 48, "depth": DEPTH, "num_heads": 3, "num_classes": 5}
    rotary = {"num_reg_tokens": 2, "use_rot_pos_emb": True, "ref_feat_shape": (8, 8), "init_values": 0.1}
    model: nn.Module = eva.Eva(**{**shape, **rotary, "dynamic_img_size": True, **options})
    return model


def small_adapter(vit: nn.Module | None = None, **options: Any) -> Any:
    """Two blocks per interaction; the default blocks 2, 4 and 6 each begin one. In evaluation mode."""
    from agglo.lab.tasks.detection.model.adapter import ViTAdapter

    torch.manual_seed(0)
    vit = small_vit() if vit is None else vit
    settings = {"prior_width": 8, "nominal_size": (64, 64), "drop_path": 0.0, **options}
    return enlivened(ViTAdapter(vit, **settings)).eval()


def enlivened(model: Any) -> Any:
    """Random weights on top, so that injectors (gamma starts at 0) and offsets matter, and attention is uneven."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
        for interaction in model.interactions:
            interaction.injector.gamma.add_(0.5)
        for block in model.vit.blocks:
            if getattr(block.attn, "qkv", None) is not None:
                block.attn.qkv.weight.mul_(5)
    return model
