"""Means that are as long as their members: the definition, gradients, half precision, and where nothing may change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agglo.grouping import Grouping


def by_hand(grouping: Grouping, x: Tensor) -> Tensor:
    """The definition in float64, group by group, differentiable."""
    each = torch.ones(grouping.labels.shape) if grouping.weights is None else grouping.weights
    images = []
    for b in range(len(x)):
        groups = []
        for g in range(grouping.n_groups):
            members, pulls = x[b, grouping.labels[b] == g].double(), each[b, grouping.labels[b] == g].double()
            mean = (members * pulls[:, None]).sum(0) / pulls.sum() if pulls.sum() > 0 else torch.zeros(x.shape[2])
            length = mean.norm()
            if g >= grouping.prefix and length > 0:
                mean = mean * ((members.norm(dim=1) * pulls).sum() / pulls.sum()) / length
            groups.append(mean)
        images.append(torch.stack(groups))
    return torch.stack(images)


def random_case(
    seed: int, batch: int, n: int, k: int, prefix: int, weighted: bool, drops: bool
) -> tuple[Grouping, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1 if drops else 0, k, (batch, n), generator=generator)
    weights = torch.randint(1, 9, (batch, prefix + n), generator=generator).float() if weighted else None
    if weights is not None:
        weights[:, :prefix] = 1
    x = torch.randn(batch, prefix + n, 37, generator=generator)  # no multiple of a vector register
    return Grouping.of(labels, k, prefix, weights, drops=drops), x


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    n=st.integers(1, 20),
    k=st.integers(1, 20),
    prefix=st.integers(0, 3),
    weighted=st.booleans(),
    drops=st.booleans(),
)
def test_merged_tokens_are_as_long_as_their_members(
    seed: int, batch: int, n: int, k: int, prefix: int, weighted: bool, drops: bool
) -> None:
    """With the kernel and, where gradients are wanted, without it; k above n leaves groups that only pad."""
    grouping, x = random_case(seed, batch, n, k, prefix, weighted, drops)
    expected = by_hand(grouping, x).float()
    for tokens in (x, x.clone().requires_grad_(), x.transpose(0, 1).contiguous().transpose(0, 1)):
        merged = grouping.merge(tokens, "preserve_norm")
        torch.testing.assert_close(merged.detach(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(merged[:, :prefix], x[:, :prefix])
        assert (merged[grouping.sizes == 0] == 0).all()
        assert torch.equal(grouping.merge(tokens, "plain"), grouping.merge(tokens))


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_are_those_of_the_definition(drops: bool) -> None:
    grouping, x = random_case(3, 2, 9, 4, 1, True, drops)
    direction = torch.randn(2, 5, 37, generator=torch.Generator().manual_seed(0))
    found, expected = x.clone().requires_grad_(), x.clone().double().requires_grad_()
    (grouping.merge(found, "preserve_norm") * direction).sum().backward()
    (by_hand(grouping, expected) * direction).sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad.float())
    assert torch.equal(found.grad[:, 0], direction[:, 0])  # prefix tokens are left alone


def test_weights_that_are_learned_get_gradients() -> None:
    grouping, x = random_case(5, 2, 6, 2, 1, True, False)
    weights = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    learned = replace(grouping, weights=weights, sizes=torch.ones(2, 3).scatter_add(1, grouping.labels, weights))
    learned.merge(x, "preserve_norm").pow(2).sum().backward()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()
    assert (weights.grad[:, 1:] != 0).all()


def test_a_mean_of_zero_stays_zero_with_finite_gradients() -> None:
    x = torch.tensor([[[3.0, 4.0], [-3.0, -4.0], [0.0, 0.0], [1.0, 0.0]]])
    grouping = Grouping.of(torch.tensor([[0, 0, 1, 2]]), 3)
    expected = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])
    assert torch.equal(grouping.merge(x, "preserve_norm"), expected)
    x.requires_grad_()
    merged = grouping.merge(x, "preserve_norm")
    assert torch.equal(merged, expected)
    merged.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Squares of 300 overflow in float16, and so do sums of many."""
    grouping, x = random_case(7, 2, 40, 3, 1, True, True)
    x = (300 * x).to(dtype)
    merged = grouping.merge(x, "preserve_norm")
    assert merged.dtype == dtype
    assert merged.isfinite().all()
    assert torch.equal(merged[:, :1], x[:, :1])
    torch.testing.assert_close(merged, by_hand(grouping, x.float()).to(dtype))


def test_chosen_tokens_stay_the_very_tokens() -> None:
    x = torch.randn(2, 6, 4)
    selected = Grouping.select(torch.tensor([[0, 2], [4, 1]]), 5, prefix=1)
    assert torch.equal(selected.merge(x, "preserve_norm"), selected.merge(x))
    medoids = replace(
        Grouping.of(torch.tensor([[0, 0, 1, 1, 1]] * 2), 2, prefix=1), chosen=torch.tensor([[0, 2, 4], [0, 1, 3]])
    )
    assert torch.equal(medoids.merge(x, "preserve_norm"), x.gather(1, medoids.chosen[..., None].expand(-1, -1, 4)))  # type: ignore[index]


def test_it_compiles_as_one_graph() -> None:
    grouping, x = random_case(11, 2, 9, 4, 1, True, True)

    def merge(x: Tensor) -> Tensor:
        return grouping.merge(x, "preserve_norm")

    torch._dynamo.reset()
    compiled = torch.compile(merge, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), merge(x))


def test_other_means_are_refused() -> None:
    grouping, x = random_case(0, 1, 4, 2, 0, False, False)
    with pytest.raises(ValueError, match=r"mean='median' is not known; accepted: 'plain', 'preserve_norm'"):
        grouping.merge(x, "median")  # type: ignore[arg-type]
