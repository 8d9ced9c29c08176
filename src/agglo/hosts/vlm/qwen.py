"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size, packed one behind the other.

The connector (the library's "merger") makes one token of 2 x 2 patches, at the end of the tower. Its outputs are
merged, each image's to a number that follows from its size; those of Qwen3-VL's deeper connectors (DeepStack) by the
very same groups. Videos stay as they are.

M-RoPE has positions on three axes: time, row and column. Every text token has the position that it has in the prompt
without reduction, and a merged token the mean position of its members, rounded. Positions are needed before an image is
seen: `get_rope_index` spreads the tokens evenly over it. When it has been seen, `at_means` puts in the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agglo.grouping import Grouping
from agglo.hosts.common.base import bound_arguments
from agglo.hosts.common.swap import StandIn, begins_pass, original_class
from agglo.hosts.vlm.reduction import MergedImage, ReducedVLM, VLMReduction, as_asked, merged_features
from agglo.methods import Grid

IMAGE = 1  # of transformers' mm_token_type_ids


class ReducedQwen(ReducedVLM):
    """A Qwen-VL, of which the positions of M-RoPE are overridden besides the features."""

    @begins_pass
    def get_image_features(
        self: Any, reduction: VLMReduction, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
    ) -> Any:
        return as_asked(self, _features(self, reduction, pixel_values, image_grid_thw, **kwargs), kwargs)

    @begins_pass
    def get_video_features(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        # Qwen3-VL's calls get_image_features.
        whole = StandIn(self, get_image_features=partial(original_class(self).get_image_features, self))
        return original_class(self).get_video_features(whole, *args, **kwargs)

    @begins_pass
    def get_rope_index(
        self: Any,
        reduction: VLMReduction,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return positions (3, B, L) and what to add to later ones (B, 1), tokens spread evenly over their image."""
        there = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        grids = _grids(self, image_grid_thw)
        counts = iter([(reduction.count(rows * columns, (rows, columns)), rows * columns) for rows, columns in grids])
        found = [_unreduced(types[real].tolist(), counts) for types, real in zip(mm_token_type_ids, there, strict=True)]
        types = pad_sequence([mm_token_type_ids.new_tensor(row) for row, _ in found], batch_first=True)
        mask = pad_sequence([input_ids.new_ones(len(row)) for row, _ in found], batch_first=True)
        given = {"mm_token_type_ids": types, "attention_mask": mask, "image_grid_thw": image_grid_thw, **kwargs}
        dense, deltas = original_class(self).get_rope_index(self, torch.zeros_like(mask), **given)
        positions = dense.new_zeros(3, *input_ids.shape)
        for row, (_, indices) in enumerate(found):
            positions[:, row, there[row]] = dense[:, row, indices]
        return positions, deltas + (mask.sum(dim=1) - there.sum(dim=1)).to(deltas).unsqueeze(1)

    @begins_pass
    def forward(self: Any, reduction: VLMReduction, *args: Any, **kwargs: Any) -> Any:
        given = bound_arguments(original_class(self), args, kwargs)
        ids, encoded = given.get("input_ids"), [(given.get("mm_encoder_outputs") or {}).get("image")]

        def get_image_features(pixel_values: Tensor, grid_thw: Tensor | None = None, **options: Any) -> Any:
            encoded[0] = _features(self, reduction, pixel_values, grid_thw, **options)
            return encoded[0]

        def language_model(*, position_ids: Tensor | None, **inputs: Any) -> Any:
            if position_ids is not None and ids is not None and encoded[0] is not None:
                is_image = ids == self.config.image_token_id
                position_ids = at_means(position_ids, is_image, encoded[0].pooler_output)
            return self.language_model(position_ids=position_ids, **inputs)

        other_self = StandIn(self, get_image_features=get_image_features, language_model=language_model)
        return original_class(self).forward(other_self, *args, **kwargs)


def _features(
    model: Any, reduction: VLMReduction, pixel_values: Tensor, image_grid_thw: Tensor | None, **kwargs: Any
) -> Any:
    grids = _grids(model, image_grid_thw)
    outputs, images = merged_features(model, reduction, grids, pixel_values, image_grid_thw, **kwargs)
    # Images are handed about one by one; each takes along where its tokens are.
    placed = zip(images, grids, strict=True)
    outputs.pooler_output = tuple(with_cells(each.tokens, each.labels, grid) for each, grid in placed)
    if getattr(outputs, "deepstack_features", None) is not None:
        deeper = [zip(layer, images, strict=True) for layer in outputs.deepstack_features]
        outputs.deepstack_features = [tuple(_by_groups(*pair) for pair in layer) for layer in deeper]
    return outputs


def _by_groups(tokens: Tensor, image: MergedImage) -> Tensor:
    """Merge other tokens (M, D) of an image as its own were."""
    if image.labels is None:
        return tokens
    groups = Grouping.of(image.labels.unsqueeze(0), len(image.tokens), drops=bool((image.labels < 0).any()))
    return groups.merge(tokens.unsqueeze(0))[0]


def _grids(model: Any, grid_thw: Tensor | None) -> list[Grid]:
    """Return (rows, columns) of every image's tokens. An image has one frame."""
    if grid_thw is None:
        return []
    side = model.config.vision_config.spatial_merge_size
    return [(frames * rows // side, columns // side) for frames, rows, columns in grid_thw.tolist()]


def _unreduced(types: list[int], counts: Iterator[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the types of a prompt's tokens without reduction, and the index in them of each token of the prompt."""
    unreduced, indices = list[int](), list[int]()
    while len(indices) < len(types):
        done = len(indices)
        count, dense = next(counts, (0, 0)) if types[done] == IMAGE else (1, 1)
        if count == 0 or types[done : done + count] != [types[done]] * count:
            raise ValueError(
                f"the prompt has {types.count(IMAGE)} placeholders for images, of which this one takes "
                f"{count or 'none'}: call agglo.adapt_processor(processor, model) before preparing prompts"
            )
        indices += [len(unreduced) + token * dense // count for token in range(count)]
        unreduced += [types[done]] * dense
    return unreduced, indices


def with_cells(tokens: Tensor, labels: Tensor | None, grid: Grid) -> Tensor:
    """Attach rows and columns (2, K) to an image's tokens (K, D), which had this grid before they were merged."""
    cell = torch.arange(grid[0] * grid[1], device=tokens.device)
    cells = torch.stack([cell // grid[1], cell % grid[1]])
    tokens.agglo_cells = cells if labels is None else _rounded_means(cells, labels, len(tokens))  # type: ignore[attr-defined]
    return tokens


def at_means(positions: Tensor, is_image: Tensor, images: Sequence[Tensor]) -> Tensor:
    """Return positions (3 or 4, B, L) with those of the images' tokens, (B, L) bool, at the means of their members.

    The first of four rows counts tokens and stays. The first position of an image is where it begins.
    """
    axes = positions[-3:].clone()
    found = axes[:, is_image]
    done = 0
    for tokens in images:
        cells: Tensor | None = getattr(tokens, "agglo_cells", None)
        if cells is None:
            raise ValueError("where in the image are these tokens? Give pixels, or what get_image_features returned")
        after = done + len(tokens)
        found[1:, done:after] = found[1:, done : done + 1] + cells.to(found.device)
        done = after
    axes[:, is_image] = found
    return torch.cat([positions[:-3], axes])


def _rounded_means(values: Tensor, labels: Tensor, n_groups: int) -> Tensor:
    """Return the means (A, n_groups) of each group's integers (A, M), halves rounded up; labels of -1 are in none."""
    kept = labels >= 0
    members = torch.zeros(n_groups, dtype=torch.int64, device=labels.device)
    members = members.index_add(0, labels[kept], torch.ones_like(labels[kept]))
    sums = torch.zeros(len(values), n_groups, dtype=torch.int64, device=labels.device)
    sums = sums.index_add(1, labels[kept], values[:, kept])
    return (2 * sums + members).div(2 * members, rounding_mode="floor")
