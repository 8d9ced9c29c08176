"""agglo's own ViTAdapter, the backbone of its detectors: a timm ViT that exchanges features with a pyramid of maps.

Injectors and extractors see all patches, as without reduction. What its members gain from an injector, a merged token
gains as their size-weighted mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.base import Host, Layout, matrix_entries
from agglo.hosts.common.blocks import AttentionInputs, checkpointed, directly
from agglo.hosts.common.forward_pass import ForwardPass
from agglo.hosts.common.positions import Positions
from agglo.hosts.common.swap import PassSetup, ReducedModule, UnsupportedModelError, begins_pass
from agglo.hosts.timm import TimmViT, parts_of

_VIT = TimmViT()
_SAMPLE = 5  # multiply-adds of a sampled value: four corners, and its weight


class _ReducedAdapter(ReducedModule):
    @begins_pass
    def forward(
        self: Any, setup: PassSetup, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None
    ) -> list[Tensor]:
        state = self.begin(images, sizes)
        embedded, last = state.embedded, self.blocks_each - 1
        run = ForwardPass(
            setup,
            embedded.tokens,
            depth=len(self.vit.blocks),
            prefix=self.prefix,
            training=self.training,
            positions=None if embedded.rope is None else Positions(embedded.grid),
            grid=state.grid,
            real=state.real,
            call=checkpointed if self.vit.grad_checkpointing else directly,
        )
        for index, block in enumerate(self.vit.blocks):
            interaction, position = divmod(index, self.blocks_each)
            if position == 0:
                run.add(F.pad(state.inject(interaction, run.patches()), (0, 0, self.prefix, 0)))
            run.block(index, block, parts_of(block), AttentionInputs(rotary=embedded.table(index)))
            if position == last:
                state.extract(interaction, run.patches())
        run.record()
        maps: list[Tensor] = state.maps(run.patches())
        return maps


class AdapterViT(Host):
    """ViTAdapter of agglo.lab.tasks.detection."""

    model_classes: ClassVar[tuple[str, ...]] = ("agglo.ViTAdapter",)
    rates_are_nested: ClassVar[bool] = True

    def check(self, module: Any) -> None:
        if isinstance(module.vit, ReducedModule):
            raise UnsupportedModelError("the ViT inside this ViTAdapter is reduced by itself: agglo.remove that first")
        _VIT.check(module.vit)

    def layout(self, module: Any) -> Layout:
        """All that the adapter does is proportional to the number of patches, and counted among their embedding."""
        vit, grid = module.vit, module.grid_of(*module.nominal_size)
        embedding, patches = matrix_entries(vit.patch_embed.proj) + _adapter_madds(module), grid[0] * grid[1]
        layout = replace(_VIT.layout(vit), prefix=module.prefix, patches=patches, grid=grid)
        return replace(layout, embedding_weights=embedding, head_madds=0, query_side_params=0)

    def mixin(self, module: Any) -> type[ReducedModule]:
        return _ReducedAdapter


def _adapter_madds(module: Any) -> int:
    """Return the multiply-adds of everything but the ViT, for each of its patches."""
    patch = module.strides[-2]
    shares = [(patch / stride) ** 2 for stride in module.strides]  # cells of each map, for every patch
    pyramid = sum(shares[1:])
    total = shares[1] * matrix_entries(module.up)
    for level, projection in enumerate(module.prior.projections):
        total += shares[level] * matrix_entries(projection)
    for level, stage in enumerate(module.prior.stages, start=1):
        total += shares[level] * matrix_entries(stage)
    stem = [layer for layer in module.prior.stem if isinstance(layer, nn.Conv2d)]
    total += matrix_entries(*stem) * (patch / stem[0].stride[0]) ** 2
    for interaction in module.interactions:
        total += _deformable(interaction.injector.attention, queries=1.0, values=pyramid)
        for extractor in interaction.extractors:
            total += _deformable(extractor.attention, queries=pyramid, values=1.0)
            total += pyramid * matrix_entries(extractor.ffn)
    return round(total)


def _deformable(attention: Any, queries: float, values: float) -> float:
    """Return the multiply-adds of one deformable attention, given its queries and values for every patch."""
    samples = prod((attention.levels, attention.points, attention.value.out_features))  # all heads
    asked = matrix_entries(attention.offsets, attention.weights, attention.out) + _SAMPLE * samples
    return queries * asked + values * matrix_entries(attention.value)
