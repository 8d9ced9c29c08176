"""ViT-Adapter (Chen et al., ICLR 2023): a plain ViT that gives the four maps a detector needs.

A small convolutional network makes a pyramid of maps. Before every few blocks of the ViT, features of the pyramid are
injected into its tokens, and after these blocks the pyramid is updated from the tokens. Every block attends to all
tokens, as in the study's detectors; the original's windows do not go with token reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from agglo.checks import choice
from agglo.hosts.common.blocks import checkpointed, directly
from agglo.hosts.common.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.timm import embed, parts_of
from agglo.lab.tasks.detection.model.adapter_layers import (
    PYRAMID,
    DeformableAttention,
    Interaction,
    Shape,
    SpatialPrior,
)
from agglo.lab.tasks.detection.model.vit import prepare_vit


class ViTAdapter(nn.Module):
    """Images (B, 3, H, W) to four maps of C channels, at strides 4, 8, 16 and 32 for patches of 16 pixels.

    Args:
        vit: timm's VisionTransformer or Eva, which becomes part of this module: its last norm and its head are removed,
            and, unless class_token, its class token with its position embedding. Patches of 4, 8 or 16 pixels; the
            strides are a quarter, a half, one and two times as many.
        interactions: Between ViT and pyramid, each around as many blocks.
        deform_heads, points: Heads of deformable attention, and points that each samples on each map.
        prior_width: Channels of the convolutional network's first map.
        drop_path: In the extractors; the blocks of the ViT have their own rates.
        class_token: Keep the class token of the ViT, for methods that need its attention. Injectors and extractors
            leave prefix tokens alone.
        padding: How tokens that show nothing but a batch's padding are merged: "apart", never with tokens of the image;
            "merge", like all others, as in the released detectors.
        nominal_size: (height, width) of the image that `agglo.report` describes, and for which methods are built whose
            parameters depend on the number of tokens.
    """

    def __init__(
        self,
        vit: Any,
        *,
        interactions: int = 4,
        deform_heads: int = 6,
        points: int = 4,
        prior_width: int = 64,
        drop_path: float = 0.1,
        class_token: bool = False,
        padding: str = "apart",
        nominal_size: tuple[int, int] = (800, 1344),
    ) -> None:
        super().__init__()
        patch = prepare_vit(vit, class_token)
        depth = len(vit.blocks)
        if interactions < 1 or depth % interactions:
            raise ValueError(f"interactions={interactions!r} must divide the ViT's {depth} blocks into equal parts")
        choice("padding", padding, ("apart", "merge"))
        self.strides = (patch // 4, patch // 2, patch, 2 * patch)
        self.prefix: int = vit.num_prefix_tokens
        self.padding, self.nominal_size = padding, nominal_size
        self.out_channels = width = int(vit.embed_dim)
        self.blocks_each = depth // interactions
        self.vit: Any = vit
        self.prior = SpatialPrior(prior_width, width, stride=self.strides[0])
        self.level_embedding = nn.Parameter(torch.randn(PYRAMID, width))
        options: dict[str, Any] = {"heads": deform_heads, "points": points, "drop_path": drop_path}
        extractors = [1] * (interactions - 1) + [3]
        self.interactions = nn.ModuleList(Interaction(width, extractors=n, **options) for n in extractors)
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in self.strides)
        for part in (self.prior, self.interactions, self.up, self.norms):
            part.apply(_initialise)
        for module in self.interactions.modules():
            if isinstance(module, DeformableAttention):
                module.reset_parameters()
        self.grid_of(*nominal_size)  # raises unless it can be padded no further

    def grid_of(self, height: int, width: int) -> Shape:
        """Return (rows, columns) of the patches of an image; ValueError unless it is padded to the coarsest stride."""
        multiple, patch = self.strides[-1], self.strides[-2]
        if height < 1 or width < 1 or height % multiple or width % multiple:
            raise ValueError(f"an image of {height} x {width} pixels; needed: multiples of {multiple}, pad it")
        return height // patch, width // patch

    def begin(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> ForwardState:
        """Begin a forward pass, whose blocks the caller runs."""
        if isinstance(self.vit, ReducedModule):
            raise UnsupportedModelError("the ViT inside is reduced by itself: remove that, and apply to the adapter")
        return ForwardState(self, images, sizes)

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> list[Tensor]:
        """Return four maps (B, C, H / stride, W / stride) of images (B, 3, H, W).

        All are padded at the right and lower border to one size, and attention sees the padding. sizes has the (height,
        width) of each image without it; None if nothing is padded.
        """
        state = self.begin(images, sizes)
        x = state.embedded.tokens
        call = checkpointed if self.vit.grad_checkpointing else directly
        for index, block in enumerate(self.vit.blocks):
            interaction, position = divmod(index, self.blocks_each)
            if position == 0:
                x = x + F.pad(state.inject(interaction, x[:, self.prefix :]), (0, 0, self.prefix, 0))
            x = call(parts_of(block).whole, block, x, state.embedded.table(index))
            if position == self.blocks_each - 1:
                state.extract(interaction, x[:, self.prefix :])
        return state.maps(x[:, self.prefix :])


class ForwardState:
    """The embedded tokens at the beginning of a forward pass, on a grid of patches, and the pyramid as it changes.

    `real` (B, N) says which patches show some of an image and not only padding; None where all do.
    """

    def __init__(self, adapter: ViTAdapter, images: Tensor, sizes: Sequence[tuple[int, int]] | None) -> None:
        vit, self.adapter = adapter.vit, adapter
        self.grid = adapter.grid_of(int(images.shape[-2]), int(images.shape[-1]))
        positions, own = vit.pos_embed, vit.patch_embed.grid_size
        if positions is not None and tuple(own) != self.grid:
            prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
            size: dict[str, Any] = {"new_size": list(self.grid), "old_size": list(own), "num_prefix_tokens": prefix}
            positions = resample_abs_pos_embed(positions, **size, antialias=False)  # as in the released detectors
        self.embedded = embed(vit, images, positions)
        real = None if sizes is None else real_patches(sizes, self.grid, adapter.strides[-2])
        self.real = None if real is None else real.to(images.device)
        self.finest, *pyramid = adapter.prior(images)
        self.shapes: list[Shape] = [(int(each.shape[-2]), int(each.shape[-1])) for each in pyramid]
        levels = zip(pyramid, adapter.level_embedding, strict=True)
        self.pyramid = torch.cat([each.flatten(2).transpose(1, 2) + level for each, level in levels], dim=1)

    def inject(self, interaction: int, patches: Tensor) -> Tensor:
        """Return what the patches (B, N, C) gain from the pyramid before an interaction's blocks."""
        module: Any = self.adapter.interactions[interaction]
        return cast(Tensor, module.injector(patches, self.grid, self.pyramid, self.shapes))

    def extract(self, interaction: int, patches: Tensor) -> None:
        """Update the pyramid from the patches (B, N, C) after an interaction's blocks."""
        module: Any = self.adapter.interactions[interaction]
        for extractor in module.extractors:
            self.pyramid = extractor(self.pyramid, self.shapes, patches, self.grid)

    def maps(self, patches: Tensor) -> list[Tensor]:
        """Return the four maps, from the pyramid and the last patches (B, N, C)."""
        flat = zip(self.pyramid.split([h * w for h, w in self.shapes], dim=1), self.shapes, strict=True)
        pyramid = [each.transpose(1, 2).unflatten(2, shape) for each, shape in flat]
        seen = patches.transpose(1, 2).unflatten(2, self.grid)
        maps = [self.adapter.up(pyramid[0]) + self.finest, *pyramid]
        sized = (F.interpolate(seen, each.shape[-2:], mode="bilinear", align_corners=False) for each in maps)
        return [norm(a + b) for a, b, norm in zip(maps, sized, self.adapter.norms, strict=True)]


def real_patches(sizes: Sequence[tuple[int, int]], grid: Shape, patch: int) -> Tensor | None:
    """Return which patches (B, N) show some of their image of a (height, width) in sizes; None if all do."""
    heights, widths = torch.tensor(sizes).unbind(1)
    top, left = (patch * torch.arange(n) for n in grid)
    real = ((top < heights[:, None])[:, :, None] & (left < widths[:, None])[:, None, :]).flatten(1)
    return None if real.all() else real


def _initialise(module: nn.Module) -> None:
    """Initialise linear layers truncated normal, convolutions by their fan-out, norms at one."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))
    elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
        nn.init.ones_(module.weight)
    if isinstance(getattr(module, "bias", None), Tensor):
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
