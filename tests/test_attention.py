"""Proportional attention: SDPA with a mask against an explicit softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agglo import attention
from agglo.attention import (
    attention_received,
    attention_with_received,
    class_attention,
    proportional_attention,
)


def explicit(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, scale: float) -> Tensor:
    return (q @ k.transpose(-2, -1) * scale + sizes.log()[:, None, None, :]).softmax(-1) @ v


def random_case(seed: int, b: int, h: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, b, h, n, d).unbind(0)
    sizes = torch.randint(0, 6, (b, n)).float()
    sizes[:, 0] = 1
    return q, k, v, sizes


@settings(max_examples=40)
@given(
    seed=st.integers(0, 9**6),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 17), st.integers(1, 20)),
    scale=st.sampled_from([None, 0.125, 1.0]),
)
def test_equals_the_explicit_softmax(seed: int, shape: tuple[int, ...], scale: float | None) -> None:
    q, k, v, sizes = random_case(seed, *shape)
    result = proportional_attention(q, k, v, sizes, scale=scale)
    wanted = explicit(q.double(), k.double(), v.double(), sizes.double(), scale or shape[-1] ** -0.5)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-5)


def test_gradients_equal_and_finite_with_padding() -> None:
    q, k, v, sizes = random_case(1, 2, 2, 6, 8)
    sizes[0, 3:] = 0
    gradients = []
    for attend in (lambda *a: explicit(*a, scale=8**-0.5), proportional_attention):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        attend(*leaves, sizes).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for actual, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v, sizes = random_case(2, 2, 2, 9, 16)
    result = proportional_attention(q.to(dtype), k.to(dtype), v.to(dtype), sizes)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), explicit(q, k, v, sizes, 0.25), rtol=0.05, atol=0.05)


def test_class_attention_is_the_first_row() -> None:
    q, k, _, sizes = random_case(3, 2, 3, 7, 8)
    rows = explicit(q, k, torch.eye(7).expand(2, 3, 7, 7), sizes, 8**-0.5)
    torch.testing.assert_close(class_attention(q, k, sizes), rows[:, :, 0])
    torch.testing.assert_close(class_attention(q, k, None).sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize("sized", [False, True])
def test_attention_weights_are_float32_under_autocast(sized: bool) -> None:
    """Autocast takes matrix products to bfloat16 whatever the dtype of their inputs."""
    q, k, _, sizes = random_case(4, 2, 3, 40, 16)
    q, k = q.bfloat16(), k.bfloat16()
    given = sizes if sized else None
    for weigh in (class_attention, attention_received):
        wanted = weigh(q.float(), k.float(), given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = weigh(q, k, given)
        assert actual.dtype == torch.float32
        assert torch.equal(actual, wanted)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 9**6),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 17), st.integers(1, 9)),
    scale=st.sampled_from([None, 0.3]),
    sized=st.booleans(),
    cache=st.sampled_from([1, 4 * 17, 4 * 17 * 17, 4 * 3 * 17 * 17, 2**21]),
)
def test_received_attention_is_the_sum_over_queries(
    seed: int, shape: tuple[int, ...], scale: float | None, sized: bool, cache: int
) -> None:
    """However few images and heads are written out at once, and padding does not ask."""
    q, k, v, sizes = random_case(seed, *shape)
    given_sizes = sizes if sized else None
    counted = (sizes if sized else torch.ones_like(sizes)).double()
    n = shape[2]
    rows = explicit(
        q.double(), k.double(), torch.eye(n).double().expand(*shape[:2], n, n), counted, scale or shape[-1] ** -0.5
    )
    wanted = (rows * (counted > 0)[:, None, :, None]).sum(dim=(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_CACHE", cache)
        received = attention_received(q, k, given_sizes, scale=scale)
        attended, too = attention_with_received(q, k, v, given_sizes, scale=scale)
    assert received.dtype == too.dtype == torch.float32
    torch.testing.assert_close(received.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(too.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        attended, proportional_attention(q, k, v, given_sizes, scale=scale), rtol=1e-4, atol=1e-5
    )


class Largest(TorchDispatchMode):
    """The most elements that any result had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])
        return result


def test_received_attention_never_holds_all_weights() -> None:
    q, k, v, sizes = random_case(5, 16, 3, 130, 16)
    with Largest() as largest, torch.no_grad():
        attention_with_received(q, k, v, sizes)
        attention_received(q, k, sizes)
    assert largest.elements <= max(2**21 // 4, q.numel()) < 16 * 3 * 130 * 130


def test_received_attention_beside_gradients_and_dropout() -> None:
    q, k, v, sizes = random_case(6, 2, 3, 9, 8)
    wanted = attention_received(q, k, sizes)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attended, received = attention_with_received(*leaves, sizes)
    torch.testing.assert_close(received, wanted)
    torch.testing.assert_close(attended, proportional_attention(q, k, v, sizes))
    assert attended.requires_grad and not received.requires_grad
    attended, received = attention_with_received(q, k, v, sizes, dropout=0.9)
    assert not torch.allclose(attended, proportional_attention(q, k, v, sizes), atol=1e-2)
    torch.testing.assert_close(received, wanted)
