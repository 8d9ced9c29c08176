"""ATC and ToMe as methods: what they are shown and what they answer, against definitions written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import agglo
from agglo.methods import ATC, ToMe
from agglo.plan import Plan
from tests.support.reductions import view


def plain_matching(features: Tensor, prefix: int) -> tuple[list[int], list[int], dict[int, int]]:
    """Even positions, most similar to an odd one first; odd positions; the most similar odd one of every even one."""
    unit = features / features.norm(dim=1, keepdim=True)
    even = [p for p in range(len(features)) if (p + prefix) % 2 == 0]
    odd = [p for p in range(len(features)) if (p + prefix) % 2 == 1]
    best = {a: max(odd, key=lambda b: float(unit[a] @ unit[b])) for a in even}
    return sorted(even, key=lambda a: -float(unit[a] @ unit[best[a]])), odd, best


@settings(max_examples=50)
@given(seed=st.integers(0, 9**6), n=st.integers(2, 25), prefix=st.integers(0, 3), share=st.floats(0, 1))
def test_tome_is_its_definition_in_the_order_of_the_released_code(seed: int, n: int, prefix: int, share: float) -> None:
    n_merges = round(share * (n // 2))
    shown = view(seed, n=n, prefix=prefix, target=n - n_merges)
    labels = ToMe().reduce(shown).grouping.labels
    assert torch.equal(labels[:, :prefix], torch.arange(prefix).expand(2, -1))
    for image, keys in zip(labels[:, prefix:] - prefix, shown.keys.mean(1)[:, prefix:], strict=True):
        even, odd, best = plain_matching(keys, prefix)
        left = even[n_merges:] if prefix == 0 else sorted(even[n_merges:])
        assert image[left + odd].tolist() == list(range(n - n_merges))
        assert all(image[leaving] == image[best[leaving]] for leaving in even[:n_merges])


def test_tome_counts_are_honest() -> None:
    plan = Plan(agglo.Stages(0.5))
    assert plan.counts(ToMe(), 196, 12) == [196] * 3 + [98] * 3 + [49] * 3 + [25] * 3
    assert Plan(agglo.Stages(0.7)).counts(ToMe(), 196, 12)[3::3] == [137, 96, 67]
    with pytest.raises(ValueError, match=r"from 196 to 49.*at least 98 stay.*0.5"):
        Plan(agglo.Stages(0.25)).targets(ToMe(), 196, 12, strict=True)
    # A pass over an image of another size takes the nearest count that the method can leave.
    assert Plan(agglo.Stages(0.25)).counts(ToMe(), 196, 12) == [196] * 3 + [98] * 3 + [49] * 3 + [25] * 3
    assert ToMe().reachable(49, 24) == 25
    with pytest.raises(ValueError, match="from 49 to 23"):
        ToMe().reachable(49, 23)


@pytest.mark.parametrize("linkage", ["single", "average", "complete"])
def test_atc_groups_are_those_of_the_keys(linkage: str) -> None:
    shown = view()
    grouping = ATC(linkage).reduce(shown).grouping
    keys = shown.keys.mean(1)[:, 1:]
    expected = agglo.cluster(keys, 5, linkage, backend="reference")
    assert torch.equal(grouping.labels[:, 1:] - 1, expected)
    assert torch.equal(grouping.labels[:, 0], torch.zeros(2, dtype=torch.int64))


def test_features_are_what_they_say() -> None:
    shown = view()
    torch.testing.assert_close(shown.features("keys"), shown.keys.mean(1)[:, 1:])
    torch.testing.assert_close(shown.features("values"), shown.values.mean(1)[:, 1:])
    assert torch.equal(shown.features("tokens"), shown.tokens[:, 1:])
    per_head = shown.features("keys_per_head")
    cosines = torch.nn.functional.cosine_similarity(
        shown.keys[:, :, 1:, None], shown.keys[:, :, None, 1:], dim=-1
    ).mean(1)
    mean_cosine = torch.nn.functional.cosine_similarity(per_head[:, :, None], per_head[:, None], dim=-1)
    torch.testing.assert_close(mean_cosine, cosines)


@torch.no_grad()
def test_a_threshold_compiles_in_pieces_and_gives_each_image_what_it_gets_alone() -> None:
    """How many tokens are left depends on the image, which no single graph can hold; the result is the same."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    model = timm.VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5).eval()
    agglo.apply(model, threshold=0.3, blocks=(1,))
    x = torch.randn(2, 3, 32, 32)
    x[0] = x[0, :, :1, :1] + 0.01 * x[0]
    with agglo.trace(model) as trace:
        expected = model(x)
    counts: Any = trace.steps[0].total.counts
    assert counts[0] < counts[1]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
    for index in range(2):
        torch.testing.assert_close(model(x[index : index + 1])[0], expected[index], rtol=0, atol=1e-5)
