"""Methods that drop tokens, against slow transcriptions of their definitions, with attention written out."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import agglo
from agglo.attention import policy_attention
from agglo.methods import ModelShape, create
from agglo.methods.baselines import _cells
from agglo.methods.class_attention import sample
from agglo.methods.dynamic_vit import DynamicViT, distillation_loss
from tests.support.reductions import images, lively_vit, view

# The slow model: one image, tokens as rows, a method as a function that says what becomes of the rows.

Chosen = tuple[list[int], Tensor | None]
Choose = Callable[[int, int, Tensor, list[Tensor], Tensor, list[int]], Chosen]


def by_hand(model: Any, image: Tensor, blocks: tuple[int, ...], choose: Choose, before: bool = False) -> list[Tensor]:
    """Logits, and the patches (N, C) at full length after the last norm, each at its last value.

    choose(stage, n_patches, x, attention_by_head, values, alive) gives the patches to keep, in order, and an extra
    token; alive are the original positions of the patches at hand.
    """
    x = model._pos_embed(model.patch_embed(image[None]))[0]
    alive = list(range(len(x) - 1))
    full = x[1:].clone()
    for index, block in enumerate(model.blocks):
        attn = block.attn

        def reduce(maps: list[Tensor], values: Tensor, index: int = index) -> None:
            nonlocal x, alive, full
            for row, position in enumerate(alive):
                if position >= 0:
                    full[position] = x[1 + row]
            kept, extra = choose(blocks.index(index), len(full), x, maps, values, alive)
            rows = [x[0], *(x[1 + row] for row in kept)]
            x = torch.stack(rows if extra is None else [*rows, extra])
            alive = [alive[row] for row in kept] + ([] if extra is None else [-1])

        if before and index in blocks:
            reduce([], x)
        qkv = attn.qkv(block.norm1(x)).reshape(len(x), 3, attn.num_heads, attn.head_dim)
        maps, outs = [], []
        for head in range(attn.num_heads):
            q, k, v = (qkv[:, which, head] for which in range(3))
            maps.append((q @ k.T / math.sqrt(attn.head_dim)).softmax(-1))
            outs.append(maps[-1] @ v)
        x = x + attn.proj(torch.cat(outs, dim=-1))
        if not before and index in blocks:
            reduce(maps, qkv[:, 2])
        x = x + block.mlp(block.norm2(x))
    for row, position in enumerate(alive):
        if position >= 0:
            full[position] = x[1 + row]
    return [model.head(model.norm(x)[0]), model.norm(full)]


def best_by_hand(name: str, rate: float, method: Any) -> Choose:
    def choose(stage: int, n: int, x: Tensor, maps: list[Tensor], values: Tensor, alive: list[int]) -> Chosen:
        if name == "dynamicvit":
            scores = keep_scores(method.predictors[stage], x[1:], torch.ones(len(alive)))
        else:
            scores = torch.stack([m[0, 1:] for m in maps]).mean(0)
        best = sorted(range(len(alive)), key=lambda row: -float(scores[row]))
        n_kept = int(n * rate ** (stage + 1) + 1e-9)
        fused = sum((scores[row] * x[1 + row] for row in best[n_kept:]), torch.zeros_like(x[0]))
        return best[:n_kept], fused if name == "evit" else None

    return choose


def ats_by_hand(rate: float) -> Choose:
    def choose(stage: int, n: int, x: Tensor, maps: list[Tensor], values: Tensor, alive: list[int]) -> Chosen:
        significance = [
            sum(float(m[0, 1 + row]) * float(values[1 + row, head].norm()) for head, m in enumerate(maps))
            for row in range(len(alive))
        ]
        total = sum(significance) + 1e-6
        cdf = np.cumsum([s / total for s in significance])
        budget = int(n * rate ** (stage + 1) + 1e-9) + 1
        points = [(2 * j + 1) / (2 * budget) for j in range(budget - 1)]
        return sorted({int(np.argmin(np.abs(cdf - point))) for point in points}), None

    return choose


def keep_scores(predictor: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities (N,) to keep the tokens (N, C), written out."""
    norm, first, _ = predictor.embed
    hidden = torch.nn.functional.gelu(first(norm(x)))
    half = x.shape[1] // 2
    mean = sum(m * row[half:] for m, row in zip(mask, hidden, strict=True)) / mask.sum()
    rows = []
    for row in hidden:
        y = torch.cat([row[:half], mean])
        for layer in (predictor.decide[0], predictor.decide[2]):
            y = torch.nn.functional.gelu(layer(y))
        rows.append(predictor.decide[4](y))
    return torch.stack(rows).log_softmax(-1)[:, 0]


@pytest.mark.parametrize("rate", [0.25, 0.9])
@pytest.mark.parametrize("name", ["topk", "evit", "ats", "dynamicvit"])
@torch.no_grad()
def test_the_model_is_the_slow_model(name: str, rate: float) -> None:
    model, x = lively_vit(), images(2)
    slow = copy.deepcopy(model)
    agglo.apply(model, name, keep_rate=rate)
    method = getattr(model, "agglo_method", None)
    choose = ats_by_hand(rate) if name == "ats" else best_by_hand(name, rate, method)
    logits, features = model(x), model.forward_features(x)
    for index, image in enumerate(x):
        expected, full = by_hand(slow, image, (3, 6, 9), choose, before=name == "dynamicvit")
        torch.testing.assert_close(logits[index], expected, rtol=0, atol=3e-5)
        if name != "evit":  # whose patches have gone into the fused token
            torch.testing.assert_close(features[index, 1:], full, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["l1", "pool"])
def test_what_is_no_grid_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs a grid.*15"):
        create(name).stages(15, [7], None)
    with pytest.raises(ValueError, match="2 x 4"):
        create(name).stages(15, [7], (2, 4))
    assert len(create(name).stages(15, [7], (3, 5))) == 1


def test_pooling_averages_cells() -> None:
    shown = view(n=24, target=6, grid=(4, 6))
    assert create("pool").stages(24, [6, 1], (4, 6)) == [6, 2]
    outcome = create("pool").reduce(shown)
    with_cells = [_cells([14, 10]), _cells([14, 10, 7]), _cells([14, 10, 7, 5])]
    widths = [1] * 14
    for cells in with_cells:
        assert len(cells) == len(widths)
        assert all(b - a in (0, 1) for a, b in itertools.pairwise(cells))
        widths = [sum(w for w, cell in zip(widths, cells, strict=True) if cell == c) for c in range(cells[-1] + 1)]
    assert sum(widths) == 14
    assert 2 <= min(widths) <= max(widths) <= 4
    expected = shown.patches.unflatten(1, (2, 2, 3, 2)).mean(dim=(2, 4)).flatten(1, 2)
    torch.testing.assert_close(outcome.grouping.merge(shown.tokens)[:, 1:], expected)
    merged, sizes = outcome.grouping.merge(shown.tokens), outcome.grouping.sizes
    later = replace(shown, tokens=merged, sizes=sizes, target=2, tokens_before=(24,))
    again = create("pool").reduce(later).grouping
    assert again.labels.tolist() == [[0, 1, 2, 2, 1, 2, 2]] * 2
    assert again.sizes.tolist() == [[1, 8, 16]] * 2


def test_random_dropping_is_random_and_repeatable() -> None:
    drawn = create("random").reduce(view(batch=80, n=16)).grouping.labels
    assert len({tuple(row) for row in drawn.tolist()}) > 40
    assert (drawn.ge(0).float().mean(dim=0)[1:] - 5 / 16).abs().max() < 0.25
    same = [create("random", seed=3).reduce(view(n=16)).grouping.labels for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], create("random", seed=3).reduce(view(n=16, stage=1)).grouping.labels)


def test_ats_never_samples_padding() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.0, 0.0]])
    sampled = sample(weights, 9, torch.tensor([3]))
    assert sampled.tolist() == [[True, True, True, False, False]]


def test_policy_attention_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3))
    policy = torch.tensor([[1.0, 0, 1, 1, 0], [1.0, 1, 1, 1, 1]])
    out = policy_attention(q, k, v, policy)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                logits = [float(q[b, h, i] @ k[b, h, j]) / 2 for j in range(5)]
                e = [math.exp(a - max(logits)) * (1.0 if i == j else float(policy[b, j])) for j, a in enumerate(logits)]
                weights = [(each + 1e-6 / 5) / (sum(e) + 1e-6) for each in e]
                expected = sum(w * v[b, h, j] for j, w in enumerate(weights))
                torch.testing.assert_close(out[b, h, i], expected)


# DynamicViT in training.


def test_dynamicvit_draws_a_mask_that_only_shrinks() -> None:
    method = DynamicViT()
    method.build(ModelShape(((16, 8), (8, 4)), width=8, heads=3, prefix=1))
    shown = view(n=16, training=True, target=8)
    torch.manual_seed(5)
    outcome: Any = method.reduce(shown)
    torch.manual_seed(5)
    noise = -torch.empty(2, 16, 2).exponential_().log()
    for b in range(2):
        keep = keep_scores(method.predictors[0], shown.patches[b], torch.ones(16))
        drop = (1 - keep.exp()).log()
        expected = (keep + noise[b, :, 0] > drop + noise[b, :, 1]).float()
        torch.testing.assert_close(outcome.policy[b, 1:], expected)
    shares = outcome.policy[:, 1:].mean(1)
    torch.testing.assert_close(outcome.loss, 2.0 * (shares - 0.5).pow(2).mean() / 2)
    later: Any = method.reduce(replace(shown, policy=outcome.policy, stage=1, target=4))
    assert (later.policy <= outcome.policy).all()
    assert (later.policy[:, 0] == 1).all()
    assert later.grouping.n_groups == 17


def test_distillation_loss_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(3, 7, generator=generator) for _ in range(2))
    tokens, dense = (torch.randn(3, 5, 4, generator=generator) for _ in range(2))
    kept = torch.tensor([[1.0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    p, q = teacher.softmax(-1), logits.softmax(-1)
    divergence = (p * (p / q).log()).sum() / 3
    error = (tokens - dense)[kept.bool()].square().mean()
    loss = distillation_loss(logits, teacher, tokens, dense, kept)
    torch.testing.assert_close(loss, 0.5 * divergence + 0.5 * error)
    nothing = distillation_loss(logits, logits, tokens, dense, torch.zeros(3, 5))
    assert float(nothing) == pytest.approx(0, abs=1e-6)
