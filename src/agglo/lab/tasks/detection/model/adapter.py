"""ViT-Adapter (Chen et al., ICLR 2023): a plain ViT that gives the four maps a detector needs.

A small convolutional network makes a pyramid of maps. Before every few blocks of the ViT, an `Injector` adds features
of the pyramid to the tokens, and after these blocks an `Extractor` updates the pyramid from the tokens. Every block
attends to all tokens, as in the study's detectors; the original's windows do not go with token reduction.

Both use multi-scale deformable attention (Zhu et al., Deformable DETR, ICLR 2021): every query samples a few points of
each map at learned offsets and mixes the samples by learned weights,

    out(q) = W_out  sum over levels l and points p of  a_lp(q) (W_value x_l)(position(q) + offset_lp(q) / extent_l)

for every head separately, extent_l being the map's width and height. The weights a are a softmax over all levels and
points together. Maps are sampled bilinearly, and are zero outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath, resample_abs_pos_embed
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from agglo.hosts.common.blocks import checkpointed, directly
from agglo.hosts.common.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.timm import embed, parts_of
from agglo.lab.tasks.detection.model.vit import prepare_vit

Shape = tuple[int, int]

EPS = 1e-6  # of layer norms, as in the ViT's blocks
PYRAMID = 3  # maps that tokens and pyramid exchange: at half, one and two times the ViT's stride
_STEM_STRIDES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}  # of the first convolution and of the pooling, by the stem's stride


class SpatialPrior(nn.Module):
    """A small convolutional network from images (B, 3, H, W) to four maps of out_width channels.

    Their strides are s, 2s, 4s and 8s, where s is 4 for ViT-Adapter's patches of 16 pixels, and 1 or 2 for smaller
    ones. The stem has `width` channels, the maps 1, 2, 4 and 4 times as many before the last, 1 x 1, convolutions.
    """

    def __init__(self, width: int, out_width: int, stride: int) -> None:
        super().__init__()
        first, pooling = _STEM_STRIDES[stride]
        self.stem = nn.Sequential(
            *Conv2dNormActivation(3, width, stride=first),
            *Conv2dNormActivation(width, width),
            *Conv2dNormActivation(width, width),
            nn.MaxPool2d(3, pooling, padding=1),
        )
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stages = nn.ModuleList(Conv2dNormActivation(*pair, stride=2) for pair in pairwise(widths))
        self.projections = nn.ModuleList(nn.Conv2d(each, out_width, 1) for each in widths)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [cast(Tensor, self.stem(images))]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return [projection(each) for projection, each in zip(self.projections, maps, strict=True)]


class DeformableAttention(nn.Module):
    """Deformable attention of queries (B, Q, C) to `levels` maps of C channels, `points` on each for every head."""

    def __init__(self, width: int, *, heads: int, levels: int, points: int = 4) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} do not divide the width {width}")
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(width, heads * levels * points * 2)
        self.weights = nn.Linear(width, heads * levels * points)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every head another direction, with point p at p + 1 steps from the query, and equal weights."""
        angles = torch.arange(self.heads) * (2 * math.pi / self.heads)
        directions = torch.stack([angles.cos(), angles.sin()], dim=-1)
        directions = directions / directions.abs().amax(dim=-1, keepdim=True)
        steps = torch.arange(1, self.points + 1).view(1, 1, -1, 1)
        offsets = directions[:, None, None] * steps.expand(self.heads, self.levels, self.points, 1)
        with torch.no_grad():
            self.offsets.bias.copy_(offsets.flatten())
        for zeroed in (self.offsets.weight, self.weights.weight, self.weights.bias, self.value.bias, self.out.bias):
            nn.init.zeros_(zeroed)
        nn.init.xavier_uniform_(self.value.weight)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, queries: Tensor, positions: Tensor, maps: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """Attend, in float32 under autocast: offsets are fractions of a pixel on maps of a thousand.

        Queries (B, Q, C) are at positions (Q, 2), x and y from 0 to 1; maps (B, S, C) of these shapes (height, width)
        follow each other, row by row.
        """
        dtype, width = self.value.weight.dtype, queries.shape[-1]
        with torch.autocast(queries.device.type, enabled=False):
            queries, maps = queries.to(dtype), maps.to(dtype)
            value = self.value(maps).float().unflatten(-1, (self.heads, -1))
            offsets = self.offsets(queries).float().unflatten(-1, (self.heads, self.levels, self.points, 2))
            weights = self.weights(queries).float().unflatten(-1, (self.heads, -1)).softmax(dim=-1)
            extents = offsets.new_tensor([(w, h) for h, w in shapes])[:, None]
            points = positions.float().view(1, -1, 1, 1, 1, 2) + offsets / extents
            on_grid = (2 * points - 1).transpose(1, 2).flatten(0, 1)  # (B * H, Q, L, P, 2), from -1 to 1 on the map
            found = []
            for level, one_map in enumerate(value.split([h * w for h, w in shapes], dim=1)):
                level_map = one_map.permute(0, 2, 3, 1).flatten(0, 1).unflatten(-1, shapes[level])  # (B * H, d, h, w)
                found.append(F.grid_sample(level_map, on_grid[:, :, level], padding_mode="zeros", align_corners=False))
            mixed = torch.stack(found, dim=-2).flatten(-2) * weights.transpose(1, 2).flatten(0, 1).unsqueeze(1)
            return cast(Tensor, self.out(mixed.sum(-1).view(len(value), width, -1).transpose(1, 2).to(dtype)))


def cell_centres(shapes: Sequence[Shape], device: torch.device | None = None) -> Tensor:
    """Return x and y, from 0 to 1, of the cells of one or several grids, row by row: (sum of cells, 2), in float32.

    >>> cell_centres([(1, 2)])
    tensor([[0.2500, 0.5000],
            [0.7500, 0.5000]])
    """
    grids = []
    for height, width in shapes:
        y, x = ((torch.arange(n, device=device, dtype=torch.float32) + 0.5) / n for n in (height, width))
        grids.append(torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).view(-1, 2))
    return torch.cat(grids)


class Injector(nn.Module):
    """What the tokens gain from the pyramid: gamma * attention(LN(tokens), LN(pyramid)). gamma (C,) starts at 0."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.norm_tokens = nn.LayerNorm(width, eps=EPS)
        self.norm_pyramid = nn.LayerNorm(width, eps=EPS)
        self.attention = DeformableAttention(width, heads=heads, levels=PYRAMID)
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor, grid: Shape, pyramid: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """Return the gain (B, N, C) of tokens (B, N, C) on a grid from a pyramid (B, S, C) of maps of these shapes."""
        positions = cell_centres([grid], tokens.device)
        found = self.attention(self.norm_tokens(tokens), positions, self.norm_pyramid(pyramid), shapes)
        return (self.gamma * found).to(tokens.dtype)


class ConvFFN(nn.Module):
    """Two linear layers with a depthwise 3 x 3 convolution between them, the same for all maps of the pyramid."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, hidden)
        self.convolution = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.activation = nn.GELU()
        self.leave = nn.Linear(hidden, width)

    def forward(self, pyramid: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """Return (B, S, C) of a pyramid (B, S, C) of maps of these shapes."""
        maps = self.enter(pyramid).split([h * w for h, w in shapes], dim=1)
        maps = [
            self.convolution(each.transpose(1, 2).unflatten(2, shape)).flatten(2).transpose(1, 2)
            for each, shape in zip(maps, shapes, strict=True)
        ]
        return cast(Tensor, self.leave(self.activation(torch.cat(maps, dim=1))))


class Extractor(nn.Module):
    """The pyramid after looking at the tokens: + attention(LN(pyramid), LN(tokens)), then + ConvFFN(LN(pyramid))."""

    def __init__(self, width: int, *, heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm_pyramid = nn.LayerNorm(width, eps=EPS)
        self.norm_tokens = nn.LayerNorm(width, eps=EPS)
        self.attention = DeformableAttention(width, heads=heads, levels=1)
        self.norm_ffn = nn.LayerNorm(width, eps=EPS)
        self.ffn = ConvFFN(width, width // 4)
        self.drop_path = DropPath(drop_path)

    def forward(self, pyramid: Tensor, shapes: Sequence[Shape], tokens: Tensor, grid: Shape) -> Tensor:
        """Return the pyramid (B, S, C), maps of these shapes, updated from tokens (B, N, C) on a grid."""
        positions = cell_centres(shapes, pyramid.device)
        pyramid = pyramid + self.attention(self.norm_pyramid(pyramid), positions, self.norm_tokens(tokens), [grid])
        return cast(Tensor, pyramid + self.drop_path(self.ffn(self.norm_ffn(pyramid), shapes)))


class Interaction(nn.Module):
    """An injector before some blocks of the ViT, and one or several extractors after them."""

    def __init__(self, width: int, *, extractors: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.injector = Injector(width, heads=heads)
        self.extractors = nn.ModuleList(Extractor(width, heads=heads, drop_path=drop_path) for _ in range(extractors))


class ViTAdapter(nn.Module):
    """Images (B, 3, H, W) to four maps of C channels, at strides 4, 8, 16 and 32 for patches of 16 pixels.

    Args:
        vit: timm's VisionTransformer or Eva, which becomes part of this module: its last norm and its head are removed,
            and, unless class_token, its class token with its position embedding. Patches of 4, 8 or 16 pixels; the
            strides are a quarter, a half, one and two times as many.
        interactions: Between ViT and pyramid, each around as many blocks.
        deform_heads: Of deformable attention.
        prior_width: Channels of the convolutional network's first map.
        drop_path: In the extractors; the blocks of the ViT have their own rates.
        class_token: Keep the class token of the ViT, for methods that need its attention. Injectors and extractors
            leave prefix tokens alone.
        nominal_size: (height, width) of the image that `agglo.report` describes, and for which methods are built whose
            parameters depend on the number of tokens.
    """

    def __init__(
        self,
        vit: Any,
        *,
        interactions: int = 4,
        deform_heads: int = 6,
        prior_width: int = 64,
        drop_path: float = 0.1,
        class_token: bool = False,
        nominal_size: tuple[int, int] = (800, 1344),
    ) -> None:
        super().__init__()
        patch = prepare_vit(vit, class_token)
        depth = len(vit.blocks)
        if interactions < 1 or depth % interactions:
            raise ValueError(f"interactions={interactions!r} must divide the ViT's {depth} blocks into equal parts")
        self.strides = (patch // 4, patch // 2, patch, 2 * patch)
        self.prefix: int = vit.num_prefix_tokens
        self.nominal_size = nominal_size
        self.out_channels = width = int(vit.embed_dim)
        self.blocks_each = depth // interactions
        self.vit: Any = vit
        self.prior = SpatialPrior(prior_width, width, stride=self.strides[0])
        self.level_embedding = nn.Parameter(torch.randn(PYRAMID, width))
        self.interactions = nn.ModuleList(
            Interaction(width, extractors=extractors, heads=deform_heads, drop_path=drop_path)
            for extractors in [1] * (interactions - 1) + [3]
        )
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
        self.real: Tensor | None = None
        if sizes is not None:
            heights, widths = torch.tensor(sizes).unbind(1)
            top, left = (adapter.strides[-2] * torch.arange(n) for n in self.grid)
            real = ((top < heights[:, None])[:, :, None] & (left < widths[:, None])[:, None, :]).flatten(1)
            self.real = None if real.all() else real.to(images.device)
        self.finest, *pyramid = adapter.prior(images)
        self.shapes: list[Shape] = [(int(each.shape[-2]), int(each.shape[-1])) for each in pyramid]
        levels = zip(pyramid, adapter.level_embedding, strict=True)
        self.pyramid = torch.cat([each.flatten(2).transpose(1, 2) + level for each, level in levels], dim=1)

    def inject(self, interaction: int, patches: Tensor) -> Tensor:
        """Return what the patches (B, N, C) gain from the pyramid before an interaction's blocks."""
        injector: Any = self.adapter.interactions[interaction].injector
        return cast(Tensor, injector(patches, self.grid, self.pyramid, self.shapes))

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
