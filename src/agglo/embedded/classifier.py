"""The embedded model: a small vision transformer for Fashion-MNIST, known to timm once this module is imported.

It is small where that costs nothing (1 channel, 64 wide) and full-sized where token reduction shows: 12 blocks, and
14 x 14 = 196 patches, as many as DeiT has at 224 pixels. Its weights are part of the package, trained by
`agglo finetune fashion_mnist`; so are the first 1000 images of Fashion-MNIST's test set (Zalando, MIT licence).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer

NAME = "agglo_fashion_vit"
WEIGHTS = Path(__file__).with_name("agglo_fashion_vit.safetensors")
IMAGES = Path(__file__).with_name("fashion-mnist")
PHOTO = Path(__file__).with_name("photos") / "pagoda.jpg"  # its licence and author: CREDITS beside it
FULL = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts the whole of it

default_cfgs = generate_default_cfgs(
    {
        NAME: {
            "num_classes": 10,
            "input_size": (1, 28, 28),
            "mean": (0.2860,),
            "std": (0.3530,),
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "license": "apache-2.0",
            "file": str(WEIGHTS),
        }
    }
)


@register_model
def agglo_fashion_vit(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """(B, 1, 28, 28) images -> (B, 10) logits; 0.6 million parameters."""
    shape = {"img_size": 28, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 12, "num_heads": 2}
    # timm's usual start, with a deviation of 0.02 everywhere, is made for wide models: at 64 channels almost nothing
    # passes through a block at first.
    start = {"weight_init": "jax"}
    return build_model_with_cfg(VisionTransformer, NAME, pretrained, **{**shape, **start, **options})
