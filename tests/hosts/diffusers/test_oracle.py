"""Merge, attend, unmerge against plain loops, and against models for which merging must change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import agglo
from agglo.grouping import Grouping
from agglo.hosts.diffusers.mixins import flux_tables, merged_table
from agglo.testing import assert_same
from tests.support.clusters import sklearn_labels
from tests.support.diffusion import TEXT, dit, flux, ltx, run, sd3, unet, unet_of_maps, wan


def groups_by_sklearn(features: Tensor, k: int, linkage: str) -> list[list[int]]:
    """Members of each group of features (N, D), by cosine distance."""
    unit = F.normalize(features.double(), dim=-1)
    distances = (1 - unit @ unit.T).clamp(min=0).fill_diagonal_(0).numpy()
    labels = sklearn_labels(distances, k, linkage).tolist()
    return [[i for i, label in enumerate(labels) if label == group] for group in range(k)]


def attend_by_hand(attention: Any, normed: Tensor, groups: list[list[int]], proportional: bool) -> Tensor:
    """Attention output (N, C) of one image's tokens (N, C), one token per group, written out."""
    merged = torch.stack(
        [sum((normed[i] for i in group), torch.zeros_like(normed[0])) / len(group) for group in groups]
    )
    heads, width = attention.heads, attention.inner_dim // attention.heads
    q, k, v = (layer(merged) for layer in (attention.to_q, attention.to_k, attention.to_v))
    rows = []
    for a in range(len(groups)):
        parts = []
        for head in range(heads):
            channels = slice(head * width, (head + 1) * width)
            logits = [
                float(q[a, channels] @ k[b, channels]) / math.sqrt(width)
                + (math.log(len(groups[b])) if proportional else 0.0)
                for b in range(len(groups))
            ]
            weights = torch.tensor(logits).softmax(dim=0)
            parts.append(sum((w * v[b, channels] for b, w in enumerate(weights)), torch.zeros(width)))
        rows.append(torch.cat(parts))
    outputs = attention.to_out[0](torch.stack(rows))
    result = torch.zeros_like(normed)
    for output, group in zip(outputs, groups, strict=True):
        for member in group:
            result[member] = output
    return result


@pytest.mark.parametrize(
    ("linkage", "features", "proportional"),
    [("average", None, True), ("single", "tokens", False), ("complete", "tokens", True)],
)
@torch.no_grad()
def test_a_block_by_hand(linkage: str, features: str | None, proportional: bool) -> None:
    model, inputs = unet(attention_head_dim=4)
    agglo.apply(model, keep_rate=0.4, features=features or "keys", proportional=proportional, linkage=linkage)
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    seen: dict[str, Tensor] = {}
    block.register_forward_hook(lambda module, args, result: seen.update(x=args[0], y=result))
    run(model, inputs)
    agglo.remove(model)
    x, text = seen["x"], inputs["encoder_hidden_states"]
    normed = block.norm1(x)
    outputs = []
    for image in range(2):
        keys = block.attn1.to_k(normed[image]).unflatten(-1, (4, -1)).mean(dim=1)
        compared = keys if features is None else x[image]
        groups = groups_by_sklearn(compared, math.ceil(64 * 0.4), linkage)
        outputs.append(attend_by_hand(block.attn1, normed[image], groups, proportional))
    y = x + torch.stack(outputs)
    y = y + block.attn2(block.norm2(y), encoder_hidden_states=text)
    y = y + block.ff(block.norm3(y))
    assert_same(seen["y"], y, atol=2e-5)


@torch.no_grad()
def test_a_map_by_hand() -> None:
    """The norm is over the whole map before tokens merge, the residual after they part."""
    model, inputs = unet_of_maps()
    agglo.apply(model, keep_rate=0.4, max_downsample=2)
    attention = model.mid_block.attentions[0]
    seen: dict[str, Tensor] = {}
    model.mid_block.resnets[0].register_forward_hook(lambda module, args, result: seen.update(x=result))
    model.mid_block.resnets[1].register_forward_hook(lambda module, args, result: seen.update(y=args[0]))
    run(model, inputs)
    agglo.remove(model)
    x = seen["x"]
    normed = attention.group_norm(x).flatten(2).transpose(1, 2)
    outputs = []
    for image in range(2):
        keys = attention.to_k(normed[image]).unflatten(-1, (attention.heads, -1)).mean(dim=1)
        groups = groups_by_sklearn(keys, math.ceil(16 * 0.4), "average")
        outputs.append(attend_by_hand(attention, normed[image], groups, proportional=True))
    attended = torch.stack(outputs).transpose(1, 2).reshape(x.shape)
    assert_same(seen["y"], (attended + x) / attention.rescale_output_factor, atol=2e-5)


@torch.no_grad()
def test_cross_attention_and_mlp_by_hand() -> None:
    model, inputs = unet()
    agglo.apply(model, keep_rate=0.4, merge=("cross", "mlp"))
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    seen: dict[str, Tensor] = {}
    block.register_forward_hook(lambda module, args, result: seen.update(x=args[0], y=result))
    with agglo.trace(model) as trace:
        run(model, inputs)
    agglo.remove(model)
    grouping, x = trace.groupings[0], seen["x"]
    x = x + block.attn1(block.norm1(x))
    mean = torch.zeros(2, grouping.n_groups, 64)
    for image in range(2):
        for group in range(grouping.n_groups):
            members = grouping.labels[image] == group
            mean[image, group, members] = 1 / members.sum()
    copies = (mean > 0).float().transpose(1, 2)
    text = inputs["encoder_hidden_states"]
    x = x + copies @ block.attn2(mean @ block.norm2(x), encoder_hidden_states=text)
    x = x + copies @ block.ff(mean @ block.norm3(x))
    assert_same(seen["y"], x, atol=1e-5)


def twice(make: Any) -> tuple[Any, Any]:
    """A model without positions along one axis, and inputs each of whose tokens is there twice along it."""
    model, inputs = make()
    tokens = inputs["hidden_states"]
    if make in (dit, sd3):
        model.pos_embed.pos_embed.zero_()
        rows = tokens[:, :, : tokens.shape[2] // 2].unflatten(2, (-1, 2)).repeat_interleave(2, dim=2)
        return model, {**inputs, "hidden_states": rows.flatten(2, 3)}
    inputs["hidden_states"] = tokens[:, :24].repeat(1, 2, 1)
    if make is flux:
        ids = torch.cartesian_prod(torch.tensor([0.0]), torch.arange(4.0), torch.arange(6.0)).repeat(2, 1)
        return model, {**inputs, "img_ids": ids}
    return model, {**inputs, "rope_interpolation_scale": (0.0, 1.0, 1.0)}


@pytest.mark.parametrize("make", [dit, sd3, flux, ltx])
def test_equal_tokens_merge_without_loss(make: Any) -> None:
    """Attention over pairs of equal tokens is attention over one of each, of size 2."""
    model, inputs = twice(make)
    dense = run(model, inputs)
    assert_same(run(agglo.apply(model, keep_rate=0.5), inputs), dense, atol=1e-5)
    off = run(agglo.apply(model, keep_rate=0.5, proportional=False), inputs)
    changes = (off - dense).abs().max() > 1e-4
    assert changes == (make in (sd3, flux))  # with text of size 1 the weights matter; alone, all are of size 2


@torch.no_grad()
def test_a_group_stands_at_its_mean_position() -> None:
    """Two tokens with a third between them get its angles; between two grid points the angle is in the middle."""
    model, _ = wan()
    cosine, sine = (table[0, :, 0] for table in model.rope(torch.zeros(1, 4, 2, 8, 12)))  # 2 x 4 x 6
    labels = torch.zeros(1, 48, dtype=torch.int64)
    labels[0, [24 + 6 + 2, 24 + 18 + 2]] = 1  # frame 1, rows 1 and 3, column 2
    labels[0, [6, 7]] = 2  # row 1, columns 0 and 1
    merged_cosine, merged_sine = merged_table((cosine, sine), (2, 4, 6), Grouping.of(labels, 3))
    assert_same((merged_cosine[0, 1], merged_sine[0, 1]), (cosine[24 + 12 + 2], sine[24 + 12 + 2]), atol=1e-5)
    middle = (torch.atan2(sine, cosine)[6] + torch.atan2(sine, cosine)[7]) / 2  # all steps are below half a turn
    assert_same((merged_cosine[0, 2], merged_sine[0, 2]), (middle.cos(), middle.sin()), atol=1e-6)


@torch.no_grad()
def test_flux_embeds_mean_ids_beside_the_text() -> None:
    model, inputs = flux()
    labels = torch.arange(48).unsqueeze(0) // 2  # pairs of columns
    grouping = Grouping.of(labels, 24)
    [(cosine, sine)] = flux_tables(model, inputs, grouping)
    means = torch.stack([inputs["img_ids"][::2], inputs["img_ids"][1::2]]).mean(dim=0)
    expected = model.pos_embed(torch.cat([inputs["txt_ids"], means]))
    assert cosine.shape[0] == TEXT + 24
    assert_same((cosine, sine), expected, atol=1e-6)
