"""Positions of merged tokens in Qwen-VL's M-RoPE, which knows three axes: time, row and column.

Every text token has the position that it has in the prompt without reduction, and a merged token the mean position of
its members, rounded. Positions are asked for before a picture is seen: `spread` gives those of tokens spread evenly
over the picture, the first of them its first. When it has been seen, `of_groups` puts the right ones in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agglo.methods import Grid

IMAGE = 1  # of transformers' mm_token_type_ids


def spread(
    rope_index: Callable[..., tuple[Tensor, Tensor]],
    counts: Sequence[tuple[int, int]],
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Positions (3, B, L) of a prompt's tokens and what to add to later ones (B, 1), before pictures are seen.

    rope_index: the model's own function, for prompts without reduction.
    counts: for each picture of the batch, tokens in this prompt and without reduction.
    """
    batch, device = len(input_ids), input_ids.device
    there = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    rest = iter(counts)
    rows = [_unreduced(mm_token_type_ids[row][there[row]].tolist(), rest) for row in range(batch)]
    longest = max(len(types) for types, _ in rows)
    types = torch.zeros(batch, longest, dtype=mm_token_type_ids.dtype, device=device)
    ids, mask = torch.zeros(batch, longest, dtype=input_ids.dtype, device=device), torch.zeros_like(types)
    for row, (unreduced, _) in enumerate(rows):
        types[row, : len(unreduced)] = torch.tensor(unreduced, dtype=types.dtype, device=device)
        mask[row, : len(unreduced)] = 1
    dense, deltas = rope_index(ids, mm_token_type_ids=types, attention_mask=mask, **others)
    positions = torch.zeros(3, *input_ids.shape, dtype=dense.dtype, device=device)
    longer = []
    for row, (unreduced, places) in enumerate(rows):
        positions[:, row, there[row]] = dense[:, row, torch.tensor(places, device=device)]
        longer.append(len(unreduced) - len(places))
    return positions, deltas + torch.tensor(longer, dtype=deltas.dtype, device=deltas.device).unsqueeze(1)


def _unreduced(types: list[int], counts: Any) -> tuple[list[int], list[int]]:
    """The types of a prompt's tokens without reduction, and where in them each token of the prompt is."""
    unreduced: list[int] = []
    places: list[int] = []
    done = 0
    while done < len(types):
        if types[done] != IMAGE:
            places.append(len(unreduced))
            unreduced.append(types[done])
            done += 1
            continue
        count, dense = next(counts, (0, 0))
        if count == 0 or types[done : done + count] != [IMAGE] * count:
            raise ValueError(
                f"the prompt has {sum(kind == IMAGE for kind in types)} placeholders for pictures, of which this one "
                f"takes {count or 'none'}: call agglo.adapt_processor(processor, model) before preparing prompts"
            )
        places += [len(unreduced) + token * dense // count for token in range(count)]
        unreduced += [IMAGE] * dense
        done += count
    return unreduced, places


def with_cells(tokens: Tensor, labels: Tensor | None, grid: Grid) -> Tensor:
    """A picture's tokens (K, D), which from here on know their rows and columns (2, K).

    labels: (M,), the group of each token before merging, -1 if it was dropped; None if none merged.
    grid: (rows, columns) of these.
    """
    cell = torch.arange(grid[0] * grid[1], device=tokens.device)
    cells = torch.stack([cell // grid[1], cell % grid[1]])
    tokens.agglo_cells = cells if labels is None else _rounded_means(cells, labels, len(tokens))  # type: ignore[attr-defined]
    return tokens


def of_groups(positions: Tensor, is_image: Tensor, pictures: Sequence[Tensor]) -> Tensor:
    """Positions (3 or 4, B, L) with those of the pictures' tokens, (B, L) bool, at the means of their members.

    The first of four rows counts tokens and stays. The first position of a picture is where it begins.
    """
    if int(is_image.sum()) != sum(map(len, pictures)):
        return positions  # the model itself will raise an error
    axes = positions[-3:].clone()
    found = axes[:, is_image]
    done = 0
    for tokens in pictures:
        cells: Tensor | None = getattr(tokens, "agglo_cells", None)
        if cells is None:
            raise ValueError(
                "it is not known where in the picture these tokens are: give the model pixels, or what its own "
                "get_image_features returned"
            )
        after = done + len(tokens)
        found[1:, done:after] = found[1:, done : done + 1] + cells.to(found.device)
        done = after
    axes[:, is_image] = found
    return torch.cat([positions[:-3], axes])


def _rounded_means(values: Tensor, labels: Tensor, n_groups: int) -> Tensor:
    """The means of each group's whole numbers (A, M), as (A, n_groups), halves rounded up. Labels of -1 are in none."""
    kept = labels >= 0
    members = torch.zeros(n_groups, dtype=torch.int64, device=labels.device)
    members = members.index_add(0, labels[kept], torch.ones_like(labels[kept]))
    sums = torch.zeros(len(values), n_groups, dtype=torch.int64, device=labels.device)
    sums = sums.index_add(1, labels[kept], values[:, kept])
    return (2 * sums + members).div(2 * members, rounding_mode="floor")
