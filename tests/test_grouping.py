"""Groups, their sizes, and the way there and back, with both kinds of means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agglo.grouping import MEANS, Grouping, Mean


def means_by_hand(grouping: Grouping, x: Tensor, mean: Mean) -> Tensor:
    """The definition in float64, group by group, differentiable."""
    each = torch.ones(grouping.labels.shape) if grouping.weights is None else grouping.weights
    images = []
    for b in range(len(x)):
        groups = []
        for g in range(grouping.n_groups):
            members, pulls = x[b, grouping.labels[b] == g].double(), each[b, grouping.labels[b] == g].double()
            found = (members * pulls[:, None]).sum(0) / pulls.sum() if pulls.sum() > 0 else torch.zeros(x.shape[2])
            if mean == "preserve_norm" and g >= grouping.prefix and found.norm() > 0:
                found = found * ((members.norm(dim=1) * pulls).sum() / pulls.sum()) / found.norm()
            groups.append(found)
        images.append(torch.stack(groups))
    return torch.stack(images)


def random_case(
    seed: int, batch: int, n: int, k: int, prefix: int, weighted: bool = False, drops: bool = False
) -> tuple[Grouping, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1 if drops else 0, k, (batch, n), generator=generator)
    weights = torch.randint(1, 9, (batch, prefix + n), generator=generator).float() if weighted else None
    if weights is not None:
        weights[:, :prefix] = 1
    x = torch.randn(batch, prefix + n, 37, generator=generator)  # no multiple of a vector register
    return Grouping.of(labels, k, prefix, weights, drops=drops), x


cases = st.builds(
    random_case,
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=60)
@given(cases, st.sampled_from(MEANS))
def test_merge_is_the_mean_of_the_members_and_unmerge_copies_it(case: tuple[Grouping, Tensor], mean: Mean) -> None:
    """Where k is above n, some groups only pad."""
    grouping, x = case
    expected = means_by_hand(grouping, x, mean).float()
    each = torch.ones(grouping.labels.shape) if grouping.weights is None else grouping.weights
    for g in range(grouping.n_groups):
        assert torch.equal(grouping.sizes[:, g], (each * (grouping.labels == g)).sum(1))
    for tokens in (x, x.clone().requires_grad_(), x.transpose(0, 1).contiguous().transpose(0, 1)):
        merged = grouping.merge(tokens, mean)
        assert merged.requires_grad == tokens.requires_grad
        torch.testing.assert_close(merged.detach(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(merged[:, : grouping.prefix], x[:, : grouping.prefix])
        assert (merged[grouping.sizes == 0] == 0).all()
    full, dropped = grouping.unmerge(expected, dropped=x), grouping.labels < 0
    assert torch.equal(full[dropped], x[dropped])
    for b in range(len(x)):
        assert torch.equal(full[b, ~dropped[b]], expected[b, grouping.labels[b, ~dropped[b]]])
    assert not grouping.unmerge(expected)[dropped].any()


@settings(max_examples=30)
@given(st.integers(0, 9**6), st.integers(0, 2))
def test_two_stages_are_one(seed: int, prefix: int) -> None:
    first, x = random_case(seed, 2, 12, 7, prefix)
    labels = random_case(seed + 1, 2, 7, 3, 0)[0].labels
    second = Grouping.of(labels, 3, prefix, weights=first.sizes)
    both = first.then(second)
    torch.testing.assert_close(both.merge(x), second.merge(first.merge(x)))
    y = torch.randn(2, prefix + 3, 4)
    assert torch.equal(both.unmerge(y), first.unmerge(second.unmerge(y)))
    assert both.sizes.sum(1).tolist() == [prefix + 12.0] * 2


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("drops", [False, True])
def test_gradients_are_those_of_the_definition(mean: Mean, drops: bool) -> None:
    grouping, x = random_case(3, 2, 9, 4, 1, True, drops)
    direction = torch.randn(2, 5, 37, generator=torch.Generator().manual_seed(0))
    found, expected = x.clone().requires_grad_(), x.clone().double().requires_grad_()
    (grouping.merge(found, mean) * direction).sum().backward()
    (means_by_hand(grouping, expected, mean) * direction).sum().backward()
    assert found.grad is not None and expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad.float())
    assert torch.equal(found.grad[:, 0], direction[:, 0]), "prefix tokens are left alone"


def test_a_mean_of_zero_stays_zero_with_finite_gradients() -> None:
    x = torch.tensor([[[3.0, 4.0], [-3.0, -4.0], [0.0, 0.0], [1.0, 0.0]]])
    grouping = Grouping.of(torch.tensor([[0, 0, 1, 2]]), 3)
    merged = grouping.merge(x.requires_grad_(), "preserve_norm")
    assert torch.equal(merged, torch.tensor([[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]))
    merged.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """Summed in float16, 4096 ones stop at 2048, and squares of 300 overflow."""
    merged = Grouping.of(torch.zeros(1, 4096, dtype=torch.int64), 1).merge(torch.ones(1, 4096, 1, dtype=dtype))
    assert merged.dtype == dtype and merged.item() == 1
    grouping, x = random_case(7, 2, 40, 3, 1, True, True)
    x = (300 * x).to(dtype)
    merged = grouping.merge(x, "preserve_norm")
    assert merged.dtype == dtype and torch.equal(merged[:, :1], x[:, :1])
    torch.testing.assert_close(merged, means_by_hand(grouping, x.float(), "preserve_norm").to(dtype))


def test_padding_is_empty_and_harmless() -> None:
    grouping = Grouping.of(torch.tensor([[0, 1, 2], [0, 0, 0]]), 3, prefix=1, counts=torch.tensor([3, 1]))
    assert grouping.sizes.tolist() == [[1, 1, 1, 1], [1, 3, 0, 0]]
    later = Grouping.of(torch.tensor([[0, 0, 1], [0, 1, 1]]), 2, 1, grouping.sizes, torch.tensor([2, 1]))
    both = grouping.then(later)
    assert both.counts is not None and both.counts.tolist() == [2, 1]
    assert both.labels.tolist() == [[0, 1, 1, 2], [0, 1, 1, 1]]
    assert both.sizes.tolist() == [[1, 2, 1], [1, 3, 0]]


def test_chosen_tokens_stay_the_very_tokens() -> None:
    x = torch.randn(2, 6, 4)
    selected = Grouping.select(torch.tensor([[0, 2], [4, 1]]), 5, prefix=1)
    assert torch.equal(selected.merge(x, "preserve_norm"), selected.merge(x))
    medoids = replace(
        Grouping.of(torch.tensor([[0, 0, 1, 1, 1]] * 2), 2, prefix=1), chosen=torch.tensor([[0, 2, 4], [0, 1, 3]])
    )
    assert torch.equal(medoids.merge(x, "preserve_norm"), x.gather(1, medoids.chosen[..., None].expand(-1, -1, 4)))  # type: ignore[index]


LABELS = torch.tensor([[0, 0, 1], [0, 1, 1]])
PAIRS = Grouping.of(LABELS, 2)


@pytest.mark.parametrize(
    ("misuse", "named"),
    [
        (lambda: Grouping.of(LABELS.float(), 2), "patch_labels"),
        (lambda: Grouping.of(LABELS, 2, 1, torch.ones(2, 3)), r"weights .*needed: \(2, 4\)"),
        (lambda: Grouping.of(LABELS, 2, counts=torch.ones(3)), "counts"),
        (lambda: Grouping.select(LABELS.bool(), 4), "positions"),
        (lambda: PAIRS.merge(torch.ones(2, 4, 5)), r"x .*needed: \(2, 3, any\)"),
        (lambda: PAIRS.merge(torch.ones(2, 3, 5), "median"), "mean='median'"),  # type: ignore[arg-type]
        (lambda: PAIRS.unmerge(torch.ones(2, 3, 5)), r"y .*needed: \(2, 2, any\)"),
        (lambda: Grouping.select(LABELS, 4).unmerge(torch.ones(2, 3, 5), torch.ones(2, 4, 6)), "dropped"),
        (lambda: PAIRS.then(PAIRS), "later grouping"),
        (lambda: PAIRS.then(Grouping.of(LABELS[:, :1], 1, prefix=1)), "prefix=1"),
    ],
)
def test_misuse_is_refused_with_what_is_needed(misuse: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        misuse()
