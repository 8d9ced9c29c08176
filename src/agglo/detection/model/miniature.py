"""The embedded Fashion-MNIST model as the ViT of a small detector: it knows garments before it has seen a scene.

It looks at grey images of 28 x 28 pixels in patches of 2 x 2. Here images are four times as large, have three channels,
and are normalised as a detector's are; the patch embedding is changed so that a grey image, enlarged pixel by pixel,
gives the very same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from agglo.detection.data.transforms import MEAN, STD

ENLARGED = 4
SIDE = 28 * ENLARGED  # pixels of its images: as many patches as the embedded model has
NAME = "miniature"


def miniature_vit(*, pretrained: bool = True, drop_path: float = 0.0) -> nn.Module:
    """timm's VisionTransformer, 64 wide, 12 blocks, patches of 8 x 8 pixels; pretrained False starts at random."""
    import timm

    from agglo.embedded import classifier as embedded

    small: Any = timm.create_model(embedded.NAME, pretrained=pretrained, drop_path_rate=drop_path)
    patch = small.patch_embed.proj.kernel_size[0] * ENLARGED
    options = {"in_chans": 3, "img_size": SIDE, "patch_size": patch, "drop_path_rate": drop_path}
    large: Any = timm.create_model(embedded.NAME, pretrained=False, **options)
    state = small.state_dict()
    own = {name: value for name, value in state.items() if not name.startswith("patch_embed.proj.")}
    [mean], [std] = embedded.default_cfgs[embedded.NAME].default.mean, embedded.default_cfgs[embedded.NAME].default.std
    weight, bias = _for_detectors(state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], mean, std)
    large.load_state_dict({**own, "patch_embed.proj.weight": weight, "patch_embed.proj.bias": bias})
    return nn.Module.train(large)


def _for_detectors(
    weight: torch.Tensor, bias: torch.Tensor, mean: float, std: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A patch embedding (C, 1, p, p) of grey pixels, normalised by mean and std of 0 to 1, for a detector's RGB.

    Each channel carries a third of the grey value, each small pixel its share of the large one.
    """
    large = weight.repeat_interleave(ENLARGED, 2).repeat_interleave(ENLARGED, 3) / (3 * ENLARGED**2)
    of_channel = torch.tensor(STD).view(1, 3, 1, 1) / 255
    shift = torch.tensor(MEAN).view(1, 3, 1, 1) / 255 - mean
    return large * of_channel / std, bias + (large * shift / std).sum((1, 2, 3))
