"""Groups, their sizes, and the way there and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agglo.grouping import Grouping


def random_grouping(seed: int, batch: int, n: int, k: int, prefix: int, weights: Tensor | None = None) -> Grouping:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, k, (batch, n), generator=generator)
    labels[:, :k] = torch.arange(k)
    return Grouping.of(labels, k, prefix, weights)


shapes = st.tuples(
    st.integers(0, 9**6), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3)
).map(lambda t: (t[0], t[1], max(t[2], t[3]), min(t[2], t[3]), t[4]))


@settings(max_examples=60, deadline=None)
@given(shapes, st.booleans())
def test_merge_is_the_weighted_mean_of_the_members(shape: tuple[int, ...], weighted: bool) -> None:
    seed, batch, n, k, prefix = shape
    torch.manual_seed(seed)
    weights = torch.randint(1, 9, (batch, prefix + n)).float() if weighted else None
    grouping = random_grouping(*shape, weights=weights)
    x = torch.randn(batch, prefix + n, 5)
    merged = grouping.merge(x)
    each = torch.ones(batch, prefix + n) if weights is None else weights
    for b in range(batch):
        assert torch.equal(merged[b, :prefix], x[b, :prefix]) or weighted
        for g in range(prefix + k):
            members = grouping.labels[b] == g
            mean = (x[b, members] * each[b, members, None]).sum(0) / each[b, members].sum()
            torch.testing.assert_close(merged[b, g], mean)
            assert grouping.sizes[b, g] == each[b, members].sum()


def test_worked_example() -> None:
    grouping = Grouping.of(torch.tensor([[0, 0, 1, 1]]), 2, weights=torch.tensor([[1.0, 1.0, 2.0, 1.0]]))
    merged = grouping.merge(torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 4, 1))
    torch.testing.assert_close(merged.flatten(), torch.tensor([1.5, 16 / 3]))
    assert grouping.sizes.tolist() == [[2.0, 3.0]]


@settings(max_examples=30, deadline=None)
@given(shapes)
def test_unmerge_gives_every_member_its_groups_value(shape: tuple[int, ...]) -> None:
    grouping = random_grouping(*shape)
    y = torch.randn(shape[1], grouping.n_groups, 4)
    full = grouping.unmerge(y)
    for b in range(shape[1]):
        assert torch.equal(full[b], y[b, grouping.labels[b]])
    torch.testing.assert_close(grouping.merge(full), y)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9**6), st.integers(0, 2))
def test_two_stages_are_one(seed: int, prefix: int) -> None:
    first = random_grouping(seed, 2, 12, 7, prefix)
    second = random_grouping(seed + 1, 2, 7, 3, prefix, weights=first.sizes)
    both = first.then(second)
    x = torch.randn(2, prefix + 12, 4)
    torch.testing.assert_close(both.merge(x), second.merge(first.merge(x)))
    y = torch.randn(2, prefix + 3, 4)
    assert torch.equal(both.unmerge(y), first.unmerge(second.unmerge(y)))
    assert both.sizes.sum(1).tolist() == [prefix + 12.0] * 2


def test_gradients() -> None:
    grouping = random_grouping(0, 2, 6, 3, 1, weights=torch.rand(2, 7) + 0.5)
    x = torch.randn(2, 7, 3, requires_grad=True)
    grouping.unmerge(grouping.merge(x)).mul(torch.randn(2, 7, 3)).sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).all()
    merged = grouping.merge(x)
    (gradient,) = torch.autograd.grad(merged[0, 2, 0], x)
    members = grouping.labels[0] == 2
    assert grouping.weights is not None
    share = grouping.weights[0] / grouping.weights[0, members].sum() * members
    torch.testing.assert_close(gradient[0, :, 0], share)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    """Summed in float16, 4096 ones stop at 2048."""
    grouping = Grouping.of(torch.zeros(1, 4096, dtype=torch.int64), 1)
    merged = grouping.merge(torch.ones(1, 4096, 1, dtype=dtype))
    assert merged.dtype == dtype
    assert merged.item() == 1


def test_padding_is_empty_and_harmless() -> None:
    counts = torch.tensor([3, 1])
    grouping = Grouping.of(torch.tensor([[0, 1, 2], [0, 0, 0]]), 3, prefix=1, counts=counts)
    assert grouping.sizes.tolist() == [[1, 1, 1, 1], [1, 3, 0, 0]]
    merged = grouping.merge(torch.ones(2, 4, 2))
    assert merged.isfinite().all()
    assert (merged[1, 2:] == 0).all()
    later = Grouping.of(torch.tensor([[0, 0, 1], [0, 1, 1]]), 2, 1, grouping.sizes, torch.tensor([2, 1]))
    both = grouping.then(later)
    assert both.counts is not None
    assert both.counts.tolist() == [2, 1]
    assert both.labels.tolist() == [[0, 1, 1, 2], [0, 1, 1, 1]]
    assert both.sizes.tolist() == [[1, 2, 1], [1, 3, 0]]


@given(
    seed=st.integers(0, 2**31), batch=st.integers(1, 3), n=st.integers(1, 9), k=st.integers(1, 9), drops=st.booleans()
)
def test_merge_is_the_same_with_and_without_gradients(seed: int, batch: int, n: int, k: int, drops: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1 if drops else 0, k, (batch, n), generator=generator)
    weights = torch.randint(1, 4, (batch, n + 1), generator=generator).float()
    x = torch.randn(batch, n + 1, 5, generator=generator)
    for given_weights in (None, weights):
        grouping = Grouping.of(labels, k, 1, given_weights, drops=drops)
        merged = grouping.merge(x.clone().requires_grad_())
        assert merged.requires_grad
        torch.testing.assert_close(grouping.merge(x), merged.detach())
        torch.testing.assert_close(grouping.merge(x.transpose(0, 1).contiguous().transpose(0, 1)), merged.detach())


LABELS = torch.tensor([[0, 0, 1], [0, 1, 1]])


@pytest.mark.parametrize(
    ("misuse", "complaint"),
    [
        (lambda: Grouping.of(LABELS[0], 2), r"patch_labels has the shape \(3,\); needed: \(any, any\)"),
        (lambda: Grouping.of(LABELS.float(), 2), r"patch_labels is torch.float32; needed: torch.int64"),
        (lambda: Grouping.of(LABELS, -1), r"n_groups=-1 must be 0 or more"),
        (lambda: Grouping.of(LABELS, 2, prefix=-1), r"prefix=-1 must be 0 or more"),
        (lambda: Grouping.of(LABELS, 2, 1, torch.ones(2, 3)), r"weights has the shape \(2, 3\); needed: \(2, 4\)"),
        (lambda: Grouping.of(LABELS, 2, counts=torch.ones(3)), r"counts has the shape \(3,\); needed: \(2\)"),
        (lambda: Grouping.select(LABELS.bool(), 4), r"positions is torch.bool; needed: torch.int64"),
        (lambda: Grouping.select(LABELS, 4, 1, torch.ones(2, 4)), r"weights .*\(2, 4\); needed: \(2, 5\)"),
        (lambda: Grouping.of(LABELS, 2).merge(torch.ones(2, 4, 5)), r"x has the shape .*needed: \(2, 3, any\)"),
        (lambda: Grouping.of(LABELS, 2).merge(torch.ones(2, 3)), r"x has the shape \(2, 3\)"),
        (lambda: Grouping.select(LABELS, 4).merge(torch.ones(1, 4, 5)), r"x has the shape .*needed: \(2, 4, any\)"),
        (lambda: Grouping.of(LABELS, 2).unmerge(torch.ones(2, 3, 5)), r"y has the shape .*needed: \(2, 2, any\)"),
        (
            lambda: Grouping.select(LABELS, 4).unmerge(torch.ones(2, 3, 5), torch.ones(2, 4, 6)),
            r"dropped has the shape .*needed: \(2, 4, 5\)",
        ),
        (lambda: Grouping.of(LABELS, 2).then(Grouping.of(LABELS, 2)), r"later grouping .*\(2, 3\); needed: \(2, 2\)"),
        (
            lambda: Grouping.of(LABELS, 2).then(Grouping.of(LABELS[:, :1], 1, prefix=1)),
            r"later grouping has prefix=1; needed: 0",
        ),
    ],
)
def test_misuse_is_refused_with_what_is_needed(misuse: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        misuse()
