"""ViT-Adapter (Chen et al., ICLR 2023): a plain ViT that gives the four maps a detector needs.

A small convolutional network makes a pyramid of maps. Before every few blocks of the ViT its tokens gain what they find
in the pyramid, and after these blocks the pyramid learns what became of the tokens. With global attention in every
block it is the backbone of the study's detectors; the original attends within windows in three of four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.detection.model.deformable_attention import DeformableAttention, Shape
from agglo.detection.model.interaction import PYRAMID, Interaction
from agglo.detection.model.spatial_prior import SpatialPrior
from agglo.detection.model.windows import windowed_block
from agglo.hosts.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.vit.run import checkpointed, directly, with_gain
from agglo.hosts.vit.timm import PARTS, Embedded, TimmViT, embed

PADDING = ("apart", "merge")
EXTRA_EXTRACTORS = 2  # after the last interaction's own


class ViTAdapter(nn.Module):
    """Images (B, 3, H, W) to four maps of C channels, at strides 4, 8, 16 and 32 for patches of 16 pixels.

    vit: timm's VisionTransformer or Eva, which becomes part of this module: its last norm and its head are taken off,
        and, unless class_token, its class token with the position embedding of it. Patches of 4, 8 or 16 pixels; the
        strides are a quarter, a half, one and two times as many.
    interactions: between ViT and pyramid, each around as many blocks.
    deform_heads, points: of deformable attention.
    prior_width: channels of the convolutional network's first map.
    ffn_ratio: hidden channels of the extractors' ConvFFN, as a fraction of C.
    drop_path: of the extractors; the blocks of the ViT have their own.
    class_token: keep the class token of the ViT, for methods that ask what it attends to. Injectors and extractors
        leave prefix tokens alone.
    windowed: attend within windows of `window` x `window` tokens, except in the last block of each interaction.
    padding: what becomes of tokens that show nothing but a batch's padding, when tokens are merged: "apart", they never
        merge with tokens of the picture; "merge", they are tokens like all others, as in the released detectors.
    nominal_size: (height, width) of the image that `agglo.reduction` speaks of, and for which methods are built whose
        parameters depend on the number of tokens.
    """

    def __init__(
        self,
        vit: nn.Module,
        *,
        interactions: int = 4,
        deform_heads: int = 6,
        points: int = 4,
        prior_width: int = 64,
        ffn_ratio: float = 0.25,
        drop_path: float = 0.1,
        class_token: bool = False,
        windowed: bool = False,
        window: int = 14,
        padding: str = "apart",
        nominal_size: tuple[int, int] = (800, 1344),
    ) -> None:
        super().__init__()
        patch = _prepare(vit, class_token)
        depth = len(vit.blocks)  # type: ignore[arg-type]
        if interactions < 1 or depth % interactions:
            raise ValueError(f"interactions={interactions!r} must divide the ViT's {depth} blocks into equal parts")
        if padding not in PADDING:
            raise ValueError(f"padding={padding!r} is not known; accepted: {', '.join(map(repr, PADDING))}")
        self.strides = (patch // 4, patch // 2, patch, 2 * patch)
        self.prefix: int = vit.num_prefix_tokens  # type: ignore[assignment]
        if windowed and self.prefix:
            raise ValueError(f"windowed=True does not go with the {self.prefix} prefix tokens of this ViT")
        self.windowed, self.window, self.padding = windowed, window, padding
        self.nominal_size = nominal_size
        self.out_channels = width = int(vit.embed_dim)  # type: ignore[arg-type]
        self.blocks_each = depth // interactions
        self.vit = vit
        self.prior = SpatialPrior(prior_width, width, stride=self.strides[0])
        self.level_embedding = nn.Parameter(torch.randn(PYRAMID, width))
        self.interactions = nn.ModuleList(
            Interaction(
                width,
                heads=deform_heads,
                points=points,
                ffn_ratio=ffn_ratio,
                drop_path=drop_path,
                extractors=1 + EXTRA_EXTRACTORS * (index == interactions - 1),
            )
            for index in range(interactions)
        )
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in self.strides)
        for part in (self.prior, self.interactions, self.up, self.norms):
            part.apply(_initialise)
        for module in self.interactions.modules():
            if isinstance(module, DeformableAttention):
                module.reset_parameters()
        self.grid_of(*nominal_size)  # ValueError if there is none

    def grid_of(self, height: int, width: int) -> Shape:
        """(rows, columns) of the patches of an image; ValueError unless it can be padded no further."""
        multiple, patch = self.strides[-1], self.strides[-2]
        if height < 1 or width < 1 or height % multiple or width % multiple:
            raise ValueError(f"an image of {height} x {width} pixels; needed: multiples of {multiple}, pad it")
        return height // patch, width // patch

    def is_global(self, block: int) -> bool:
        """Whether a block attends to all tokens."""
        return not self.windowed or block % self.blocks_each == self.blocks_each - 1

    def scene(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> Scene:
        """The beginning of a forward pass, which need not go through this module's own loop over blocks."""
        if isinstance(self.vit, ReducedModule):
            raise UnsupportedModelError(
                "agglo.apply was called on the ViT inside a ViTAdapter, which does not run it by itself: "
                "agglo.remove it there, and apply to the adapter or the detector"
            )
        return Scene(self, images, sizes)

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> list[Tensor]:
        """Four maps (B, C, H / stride, W / stride) of images (B, 3, H, W).

        sizes: (height, width) of each image within the padded batch; None if nothing is padded. Padding is an image's
            right and lower border, and attention sees it; what it is for says `padding`.
        """
        scene = self.scene(images, sizes)
        x, rotary = scene.embedded.tokens, scene.embedded.rotary
        call = checkpointed if self.vit.grad_checkpointing else directly
        for index, block in enumerate(self.vit.blocks):  # type: ignore[arg-type]
            interaction, place = divmod(index, self.blocks_each)
            if place == 0:
                x = with_gain(x, scene.inject(interaction, x[:, self.prefix :]), self.prefix)
            table = None if rotary is None else rotary.table(index)
            if self.is_global(index):
                x = call(PARTS.whole, block, x, table)
            else:
                x = call(windowed_block, block, x, table, scene.grid, self.window)
            if place == self.blocks_each - 1:
                scene.extract(interaction, x[:, self.prefix :])
        return scene.maps(x[:, self.prefix :])


class Scene:
    """One forward pass: the tokens at its beginning, and the pyramid as it changes.

    embedded: the ViT's tokens before the first block. grid: of its patches.
    real: (B, N) bool, which patches show some of an image and not only padding; None where all do.
    """

    def __init__(self, adapter: ViTAdapter, images: Tensor, sizes: Sequence[tuple[int, int]] | None) -> None:
        self.grid = adapter.grid_of(int(images.shape[-2]), int(images.shape[-1]))
        self.adapter = adapter
        self.embedded: Embedded = embed(adapter.vit, images, resized_positions(adapter.vit, self.grid))
        self.real = real_patches(sizes, images, self.grid, adapter.strides[-2])
        self.finest, *pyramid = adapter.prior(images)
        self.shapes: list[Shape] = [(int(each.shape[-2]), int(each.shape[-1])) for each in pyramid]
        levels = zip(pyramid, adapter.level_embedding, strict=True)
        self.pyramid = torch.cat([each.flatten(2).transpose(1, 2) + level for each, level in levels], dim=1)

    def inject(self, interaction: int, patches: Tensor) -> Tensor:
        """What the patches (B, N, C) gain from the pyramid before an interaction's blocks."""
        injector: Any = self.adapter.interactions[interaction]
        gain: Tensor = injector.injector(patches, self.grid, self.pyramid, self.shapes)
        return gain

    def extract(self, interaction: int, patches: Tensor) -> None:
        """Tell the pyramid what the patches (B, N, C) became."""
        module: Any = self.adapter.interactions[interaction]
        for extractor in module.extractors:
            self.pyramid = extractor(self.pyramid, self.shapes, patches, self.grid)

    def maps(self, patches: Tensor) -> list[Tensor]:
        """The four maps, from the pyramid and the last patches (B, N, C)."""
        lengths = [h * w for h, w in self.shapes]
        flat = zip(self.pyramid.split(lengths, dim=1), self.shapes, strict=True)
        pyramid = [each.transpose(1, 2).unflatten(2, shape) for each, shape in flat]
        seen = patches.transpose(1, 2).unflatten(2, self.grid)
        maps = [self.adapter.up(pyramid[0]) + self.finest, *pyramid]
        return [norm(each + _resized(seen, each)) for each, norm in zip(maps, self.adapter.norms, strict=True)]


def _resized(seen: Tensor, like: Tensor) -> Tensor:
    if seen.shape[-2:] == like.shape[-2:]:
        return seen
    return F.interpolate(seen, size=like.shape[-2:], mode="bilinear", align_corners=False)


def real_patches(sizes: Sequence[tuple[int, int]] | None, images: Tensor, grid: Shape, patch: int) -> Tensor | None:
    """Which patches (B, N) of a padded batch (B, 3, H, W) show some of their image; None if all do."""
    if sizes is None:
        return None
    height, width = images.shape[-2:]
    if len(sizes) != len(images):
        raise ValueError(f"{len(sizes)} sizes are given for {len(images)} images")
    for size in sizes:
        if not (1 <= size[0] <= height and 1 <= size[1] <= width):
            raise ValueError(f"an image of size {tuple(size)} does not fit into the batch's {height} x {width} pixels")
    rows = torch.tensor([-(-int(h) // patch) for h, _ in sizes], device=images.device)
    columns = torch.tensor([-(-int(w) // patch) for _, w in sizes], device=images.device)
    row, column = (torch.arange(n, device=images.device) for n in grid)
    real = (row < rows[:, None])[:, :, None] & (column < columns[:, None])[:, None, :]
    whole = all(-(-int(h) // patch) >= grid[0] and -(-int(w) // patch) >= grid[1] for h, w in sizes)
    return None if whole else real.flatten(1)


def resized_positions(vit: Any, grid: Shape) -> Tensor | None:
    """The ViT's absolute position embedding (1, T, C) for another grid: bicubic, without antialiasing, in float32."""
    positions: Tensor | None = vit.pos_embed
    if positions is None or tuple(vit.patch_embed.grid_size) == grid:
        return positions
    n_prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
    picture = positions[:, n_prefix:].transpose(1, 2).unflatten(2, vit.patch_embed.grid_size).float()
    picture = F.interpolate(picture, size=grid, mode="bicubic", align_corners=False).to(positions.dtype)
    return torch.cat([positions[:, :n_prefix], picture.flatten(2).transpose(1, 2)], dim=1)


def _prepare(vit: Any, class_token: bool) -> int:
    """Make a timm model the plain ViT of an adapter; returns the width of its patches."""
    host = TimmViT()
    if not host.recognises(vit):
        raise UnsupportedModelError(
            f"{type(vit).__name__} cannot be the ViT of an adapter; accepted: {', '.join(host.model_classes)}"
        )
    host.check(vit)
    embedding = vit.patch_embed
    if type(embedding).__name__ != "PatchEmbed":
        raise UnsupportedModelError(f"the ViT embeds patches by {type(embedding).__name__}; supported: PatchEmbed")
    patch = embedding.patch_size
    if patch[0] != patch[1] or patch[0] not in (4, 8, 16):
        raise UnsupportedModelError(
            f"patches of {patch[0]} x {patch[1]} pixels; supported: 4, 8 and 16 squared (timm's set_input_size with "
            "patch_size=16 resamples the embedding of others)"
        )
    if getattr(vit, "rope", None) is not None and not vit.dynamic_img_size:
        raise UnsupportedModelError("this rotary ViT has tables for one image size: make it with dynamic_img_size=True")
    if class_token and getattr(vit, "cls_token", None) is None:
        raise ValueError("class_token=True needs a ViT that has one")
    if not class_token:
        _drop_class_token(vit)
    vit.norm = vit.head = nn.Identity()
    if hasattr(vit, "fc_norm"):
        vit.fc_norm = nn.Identity()
    if getattr(vit, "attn_pool", None) is not None:
        vit.attn_pool = None
    from timm.layers import Format

    vit.dynamic_img_size = True
    embedding.strict_img_size, embedding.flatten, embedding.output_fmt = False, False, Format.NHWC
    return int(patch[0])


def _drop_class_token(vit: Any) -> None:
    """Take the class token off a ViT, with its position embedding; register tokens stay."""
    if getattr(vit, "cls_token", None) is None:
        return
    if getattr(vit, "dist_token", None) is not None:
        raise UnsupportedModelError("a distilled ViT needs both of its first tokens: give class_token=True")
    vit.cls_token = None
    if vit.pos_embed is not None and not vit.no_embed_class:
        vit.pos_embed = nn.Parameter(vit.pos_embed.detach()[:, 1:].clone())
    vit.num_prefix_tokens -= 1
    for block in vit.blocks:
        if hasattr(block.attn, "num_prefix_tokens"):
            block.attn.num_prefix_tokens -= 1
    vit.has_class_token = False


def _initialise(module: nn.Module) -> None:
    """Linear layers truncated normal, convolutions by their fan-out, norms at one; deformable attention has its own."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))
    elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
        nn.init.ones_(module.weight)
    if isinstance(getattr(module, "bias", None), Tensor):
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
