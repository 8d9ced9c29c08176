"""Methods that merge pairs (PiToMe, ToFu, MCTF, mutual pairs), against their rules in loops over one image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import agglo
from agglo.methods import View, create
from tests.support.reductions import images, lively_vit, view

Groups = list[list[int]]
# Seed, patch tokens, how many are to go, and prefix tokens.
counts = st.tuples(st.integers(0, 10**6), st.integers(2, 14), st.integers(1, 7), st.integers(0, 1))


def partition(labels: Tensor) -> set[frozenset[int]]:
    """The groups of patch labels (N,)."""
    return {frozenset((labels == label).nonzero().flatten().tolist()) for label in labels.unique()}


def cosines(features: Tensor) -> np.ndarray:
    directions = np.array([row / np.linalg.norm(row) for row in features.double().numpy()])
    return directions @ directions.T


def head_means(shown: View, image: int) -> Tensor:
    assert shown.keys is not None
    return shown.keys[image, :, shown.prefix :].mean(dim=0)


def joined(n: int, pairs: list[tuple[int, int]]) -> set[frozenset[int]]:
    """The groups of n tokens after each first token of a pair joined the group of the second, in order."""
    groups: dict[int, set[int]] = {i: {i} for i in range(n)}
    for leaver, stayer in pairs:
        groups[stayer] |= groups.pop(leaver)
    return {frozenset(members) for members in groups.values()}


def pitome_by_hand(shown: View, image: int, margin: float) -> set[frozenset[int]]:
    similar = cosines(head_means(shown, image))
    n = len(similar)
    assert shown.target is not None
    energies = []
    for i in range(n):
        energies.append(sum(c if c >= margin else math.exp(c - margin) - 1 for c in similar[i]) / n)
    highest = sorted(range(n), key=lambda i: -energies[i])[: 2 * (n - shown.target)]
    leaving, staying = highest[::2], highest[1::2]
    return joined(n, [(i, max(staying, key=lambda j: similar[i, j])) for i in leaving])


def tome_by_hand(shown: View, image: int) -> list[tuple[int, int]]:
    """The pairs of an even token (the class token is the first) and its most similar odd one, as (patch, patch)."""
    similar = cosines(head_means(shown, image))
    n = len(similar)
    assert shown.target is not None
    seekers = range(shown.prefix % 2, n, 2)
    stayers = range(1 - shown.prefix % 2, n, 2)
    pairs = [(i, max(stayers, key=lambda j: similar[i, j])) for i in seekers] if n > 1 else []
    return sorted(pairs, key=lambda pair: -similar[pair])[: n - shown.target]


def mctf_by_hand(shown: View, image: int) -> tuple[set[frozenset[int]], np.ndarray]:
    """Groups, and the weights of patches in means."""
    assert shown.attention_received is not None and shown.target is not None
    similar = cosines(shown.patches[image])
    n = len(similar)
    received = shown.attention_received[image, shown.prefix :].double().numpy()
    sizes = np.ones(n) if shown.sizes is None else shown.sizes[image, shown.prefix :].double().numpy()

    def attraction(i: int, j: int) -> float:
        information = (received[i] * received[j]) ** (-1 / 20)
        return float((similar[i, j] + 1) / 2 * information * (sizes[i] * sizes[j]) ** (-1 / 40))

    even, odd, n_merges = list(range(0, n, 2)), list(range(1, n, 2)), n - shown.target
    forwards = math.ceil(n_merges / 2)
    pairs = [(i, max(odd, key=lambda j: attraction(i, j))) for i in even] if odd else []
    forward = sorted(pairs, key=lambda pair: -attraction(*pair))[:forwards]
    left = [i for i in even if i not in [leaver for leaver, _ in forward]]
    pairs = [(j, max(left, key=lambda i: attraction(i, j))) for j in odd] if left else []
    back = sorted(pairs, key=lambda pair: -attraction(*pair))[: n_merges - forwards]
    return joined(n, [*forward, *back]), received * sizes


def mutual_by_hand(shown: View, image: int) -> set[frozenset[int]]:
    similar = cosines(head_means(shown, image))
    assert shown.target is not None
    groups: Groups = [[i] for i in range(len(similar))]

    def alike(one: int, other: int) -> float:
        return float(np.mean([similar[i, j] for i in groups[one] for j in groups[other]]))

    while len(groups) > shown.target:
        numbers = range(len(groups))
        nearest = [max((j for j in numbers if j != i), key=lambda j: alike(i, j)) for i in numbers]
        pairs = [(i, nearest[i]) for i in numbers if nearest[nearest[i]] == i and i < nearest[i]]
        taken = sorted(pairs, key=lambda pair: -alike(*pair))[: len(groups) - shown.target]
        merged = [groups[i] + groups[j] for i, j in taken]
        groups = merged + [groups[i] for i in numbers if not any(i in pair for pair in taken)]
    return {frozenset(group) for group in groups}


def patch_groups(name: str, shown: View) -> list[set[frozenset[int]]]:
    grouping = create(name).decide(shown).grouping
    assert grouping.n_groups - shown.prefix == shown.target
    return [partition(labels) for labels in grouping.labels[:, shown.prefix :]]


@given(counts, st.integers(0, 11))
def test_pitome_protects_tokens_of_low_energy(drawn: tuple[int, int, int, int], block: int) -> None:
    seed, n, removed, prefix = drawn
    shown = view(seed, n=n, target=max(n - removed, n - n // 2), prefix=prefix, block=block, depth=12)
    expected = [pitome_by_hand(shown, image, 0.9 * (1 - block / 12)) for image in range(2)]
    assert patch_groups("pitome", shown) == expected


@given(counts, st.booleans())
def test_mctf_matches_in_both_directions(drawn: tuple[int, int, int, int], sized: bool) -> None:
    seed, n, removed, prefix = drawn
    shown = view(seed, n=n, target=max(n - removed, n - n // 2), prefix=prefix)
    if sized:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 9, shown.tokens.shape[:2], generator=generator).float()
        shown = view(seed, n=n, target=shown.target, prefix=prefix, sizes=sizes)
    outcome = create("mctf").decide(shown)
    new = outcome.new_tokens(shown.tokens)
    for image in range(2):
        groups, weights = mctf_by_hand(shown, image)
        labels = outcome.grouping.labels[image, prefix:]
        assert partition(labels) == groups
        for group in groups:
            members = sorted(group)
            shares = torch.from_numpy(weights[members] / weights[members].sum())
            mean = (shares[:, None] * shown.patches[image, members]).sum(dim=0)
            torch.testing.assert_close(new[image, labels[members[0]]].double(), mean, rtol=1e-4, atol=1e-5)


@given(counts)
def test_mutual_pairs_merge_in_rounds(drawn: tuple[int, int, int, int]) -> None:
    seed, n, removed, prefix = drawn
    shown = view(seed, n=n, target=max(1, n - 2 * removed), prefix=prefix)
    assert patch_groups("mutual", shown) == [mutual_by_hand(shown, image) for image in range(2)]


def test_mutual_pairs_of_tokens_that_are_all_alike() -> None:
    """Every token is as near as any other: first pairs first, one a round, and never none."""
    labels = create("mutual").decide(view(n=6, target=2, keys=torch.ones(1, 3, 7, 4), batch=1)).grouping.labels
    assert labels.tolist() == [[0, 1, 1, 1, 1, 1, 2]]


@given(counts, st.integers(0, 11))
def test_tofu_drops_early_and_keeps_the_largest_norm_late(drawn: tuple[int, int, int, int], block: int) -> None:
    seed, n, removed, prefix = drawn
    shown = view(seed, n=n, target=max(n - removed, n - n // 2), prefix=prefix, block=block, depth=12)
    outcome = create("tofu").decide(shown)
    new = outcome.new_tokens(shown.tokens)
    torch.testing.assert_close(new[:, :prefix], shown.tokens[:, :prefix])
    for image, tokens in enumerate(shown.patches):
        pairs = tome_by_hand(shown, image)
        groups = joined(n, pairs)
        stayers = {group: next((j for i, j in pairs if i in group), min(group)) for group in groups}
        labels = outcome.grouping.labels[image, prefix:]
        assert partition(labels) == groups
        for group, stayer in stayers.items():
            members = tokens[sorted(group)]
            mean = members.mean(dim=0)
            expected = tokens[stayer] if block < 6 else mean / mean.norm() * members.norm(dim=1).max()
            torch.testing.assert_close(new[image, labels[stayer]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pitome", "tofu", "mctf"])
def test_half_of_the_tokens_can_go(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot go.*at least 98 stay"):
        agglo.apply(lively_vit(), name, keep_rate=0.4)
    model = agglo.apply(lively_vit(), name, keep_rate=0.5)
    report: Any = agglo.report(model)
    assert report.counts[3::3] == [98, 49, 25]


@torch.no_grad()
def test_methods_know_the_block() -> None:
    """ToFu's tokens are old ones early, and new ones late; PiToMe's margin falls."""
    model, x = lively_vit(), images()
    agglo.apply(model, "tofu", schedule=agglo.PerBlock((0, 40, 0, 0, 0, 0, 0, 40)))
    with agglo.trace(model) as trace:
        model(x)
    assert [step.block for step in trace.steps] == [1, 7]
    assert [step.outcome.grouping.chosen is None for step in trace.steps] == [False, True]
    assert [step.outcome.tokens is None for step in trace.steps] == [True, False]
