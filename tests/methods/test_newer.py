"""DiffRate, DTEM and the DCT baseline, against their rules in loops over one image, and what they learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import agglo
from agglo.methods import ModelShape, create
from agglo.methods.diffrate import published
from agglo.methods.dtem import relaxed_top
from tests.support.reductions import built, images, lively_vit, view


def unit(rows: Tensor) -> np.ndarray:
    return np.array([row / np.linalg.norm(row) for row in rows.double().numpy()])


@given(
    st.integers(0, 10**6), st.integers(1, 14), st.floats(0, 1), st.one_of(st.floats(0, 1), st.integers(0, 9)),
    st.integers(0, 3),
)  # fmt: skip
def test_diffrate_drops_the_least_attended_and_merges_the_next(
    seed: int, n: int, kept: float, pruned: float | int, block: int
) -> None:
    target = max(1, round(kept * n))
    shown = view(seed, n=n, target=target, block=block, depth=4)
    listed = [0] * block + [pruned] if isinstance(pruned, int) else None
    outcome = create("diffrate", pruned=listed or pruned).decide(shown)
    n_pruned = min(n - target, pruned) if isinstance(pruned, int) else int(pruned * (n - target))
    for image, attention in enumerate(shown.class_attention):
        scores = attention.mean(dim=0)[1:].tolist()
        order = sorted(range(n), key=lambda patch: -scores[patch])
        directions = unit(shown.patches[image])
        groups = {patch: [patch] for patch in sorted(order[:target])}
        for patch in order[target : n - n_pruned]:
            groups[max(groups, key=lambda other: float(directions[patch] @ directions[other]))].append(patch)
        expected = torch.full((n,), -1)
        for number, members in enumerate(groups.values()):
            expected[members] = number + 1
        assert outcome.grouping.labels[image, 1:].tolist() == expected.tolist()


def test_diffrates_published_rates() -> None:
    """Some of the tables' rows ask for more tokens than are left: those blocks do nothing."""
    rates = published("ViT-T-DeiT", 1.0)
    assert rates["schedule"].counts(196, 12) == [196, 196, 195, 189, 185, 153, 147, 147, 144, 134, 124, 20]
    assert rates["pruned"] == (0, 0, 1, 2, 2, 2, 0, 0, 0, 8, 6, 104)
    with pytest.raises(ValueError, match="ViT-H-MAE"):
        published("ViT-G", 0.6)
    with pytest.raises(ValueError, match=r"0\.9"):
        published("ViT-T-DeiT", 2)
    model = agglo.apply(lively_vit(), "diffrate", **published("ViT-T-DeiT", 0.6))
    with agglo.trace(model) as trace, torch.no_grad():
        model(images())
    dropped = [int((step.outcome.grouping.labels[0] < 0).sum()) for step in trace.steps]
    assert dropped == [published("ViT-T-DeiT", 0.6)["pruned"][step.block] for step in trace.steps]


@given(st.integers(0, 10**6), st.integers(1, 14), st.floats(0, 1))
def test_dct_cuts_off_the_highest_frequencies(seed: int, n: int, kept: float) -> None:
    target = max(1, round(kept * n))
    shown = view(seed, n=n, target=target)
    new = create("dct").decide(shown).new_tokens(shown.tokens)

    def wave(frequency: int, position: int, length: int) -> float:
        scale = math.sqrt((1 if frequency == 0 else 2) / length)
        return scale * math.cos(math.pi / length * (position + 0.5) * frequency)

    for image, tokens in enumerate(shown.patches.double()):
        for position in range(target):
            expected = torch.zeros(tokens.shape[1], dtype=torch.float64)
            for frequency in range(target):
                coefficient = sum(wave(frequency, i, n) * tokens[i] for i in range(n))
                expected += wave(frequency, position, target) * coefficient
            expected = expected * math.sqrt(target / n)  # a constant sequence stays as it is
            torch.testing.assert_close(new[image, 1 + position].double(), expected, rtol=1e-4, atol=1e-5)


def test_dtem_matches_by_its_embedding_alone() -> None:
    shown, method = view(n=12, target=7), built(create("dtem", width=3), n=12, target=7)
    outcome = method.eval().decide(shown)
    for image, tokens in enumerate(shown.patches):
        directions = unit(method.embeddings[0](tokens).detach())
        pairs = [(i, max(range(0, 12, 2), key=lambda j: float(directions[i] @ directions[j]))) for i in range(1, 12, 2)]
        pairs = sorted(pairs, key=lambda pair: -float(directions[pair[0]] @ directions[pair[1]]))[:5]
        labels = outcome.grouping.labels[image, 1:].tolist()
        assert {(i, j) for i in range(1, 12, 2) for j in range(0, 12, 2) if labels[i] == labels[j]} == set(pairs)


def test_dtem_trains_on_what_it_does_at_inference() -> None:
    """At a low temperature tokens go as a whole, so that those with any size left are the tokens of inference."""
    shown, method = view(n=12, target=7), built(create("dtem", temperature=1e-4), n=12, target=7)
    hard = method.eval().decide(shown)
    soft = method.decide(view(n=12, target=7, training=True))
    new = hard.new_tokens(shown.tokens)
    assert soft.tokens.shape == shown.tokens.shape
    torch.testing.assert_close(soft.grouping.sizes.sum(dim=1), torch.full((2,), 13.0), rtol=0, atol=1e-3)
    for image in range(2):
        left = soft.grouping.sizes[image] > 0.5
        assert left.sum() == 8
        ours = sorted(soft.tokens[image, left].tolist())
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(sorted(new[image].tolist())), rtol=0, atol=1e-3)
        sizes = torch.sort(soft.grouping.sizes[image, left]).values
        torch.testing.assert_close(sizes, hard.grouping.sizes[image].sort().values, rtol=0, atol=1e-3)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.integers(1, 8))
def test_relaxed_top_has_k_in_it(scores: list[float], k: int) -> None:
    k = min(k, len(scores))
    soft = relaxed_top(torch.tensor([scores]), k, temperature=0.1)
    assert float(soft.sum()) <= k + 1e-3 and bool((soft >= 0).all() and (soft <= 1).all())
    distinct = torch.arange(8.0).unsqueeze(0) * 100
    torch.testing.assert_close(relaxed_top(distinct, k, 0.01), (distinct >= 100 * (8 - k)).float())


def test_dtem_learns() -> None:
    """A few steps bring the reduced model's output nearer to the dense one's, as it trains."""
    model, x = lively_vit(32, 4), images(8, (32, 32))
    with torch.no_grad():
        dense = model(x)
    agglo.apply(model.requires_grad_(False), "dtem", keep_rate=0.6).train()
    method: Any = model.agglo_method
    optimizer = torch.optim.Adam(method.parameters(), lr=0.02)
    losses = []
    for _ in range(12):
        loss = (model(x) - dense).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_diffrate_learns_its_rates() -> None:
    """Rates move at the cost of the schedule, and bring a frozen model nearer to what it gave."""
    model, x = lively_vit(32, 4), images(8, (32, 32))
    with torch.no_grad():
        dense = model(x)
    agglo.apply(model.requires_grad_(False), "diffrate_learned", keep_rate=0.6).train()
    method: Any = model.agglo_method
    asked = [after for _, after in method.shape.stages]
    assert [after for _, after in method.counts(64)] == asked
    optimizer = torch.optim.Adam(method.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        with agglo.trace(model) as trace:
            difference = (model(x) - dense).pow(2).mean()
        optimizer.zero_grad()
        assert trace.loss is not None
        (difference + trace.loss).backward()
        optimizer.step()
        losses.append(difference.item())
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert [after for _, after in method.counts(64)] != asked
    assert trace.loss.item() < 0.05 * method.loss_weight  # within a fifth of the cost
    with torch.no_grad():
        learned = model.eval()(x)
        agglo.apply(agglo.remove(model), "diffrate", **method.rates())
        torch.testing.assert_close(model(x), learned)


def test_what_diffrate_trains_on_is_what_it_does_at_inference() -> None:
    shown, method = view(n=12, target=6), create("diffrate_learned")
    method.build(ModelShape(stages=((12, 6),), width=8, heads=3, prefix=1, blocks=(0,)))
    assert isinstance(method, nn.Module)
    hard = method.eval().decide(shown)
    soft = method.decide(view(n=12, target=6, training=True))
    new = hard.new_tokens(shown.tokens)
    for image in range(2):
        left = soft.policy[image] > 0.5
        assert left.sum() == new.shape[1]
        torch.testing.assert_close(soft.tokens[image, left], new[image])
        torch.testing.assert_close(soft.policy[image, left], hard.grouping.sizes[image])
