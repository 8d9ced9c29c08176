"""ATC and ToMe as methods: what they are shown and what they answer, against definitions written out here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import agglo
from agglo.grouping import Grouping
from agglo.methods import ATC, Method, ToMe
from agglo.methods.tome import match
from agglo.plan import Plan
from tests.support.reductions import view


def plain_tome(features: Tensor, n_merges: int, prefix: int) -> set[frozenset[int]]:
    """Groups of patch positions of one image, straight from the definition, over positions that include the prefix."""
    leaving, _, best = plain_matching(features, prefix)
    groups: dict[int, set[int]] = {p: {p} for p in range(len(features))}
    for a in leaving[:n_merges]:
        groups[best[a]] |= groups.pop(a)
    return {frozenset(members) for members in groups.values()}


def plain_tome_order(features: Tensor, n_merges: int, prefix: int, by_similarity: bool) -> list[int]:
    """Positions of the tokens that stay, in the order of their groups, straight from the definition."""
    leaving, odd, _ = plain_matching(features, prefix)
    left = leaving[n_merges:]
    return (left if by_similarity else sorted(left)) + odd


def plain_matching(features: Tensor, prefix: int) -> tuple[list[int], list[int], dict[int, int]]:
    """Even positions, most similar to an odd one first; odd positions; the most similar odd one of every even one."""
    unit = features / features.norm(dim=1, keepdim=True)
    even = [p for p in range(len(features)) if (p + prefix) % 2 == 0]
    odd = [p for p in range(len(features)) if (p + prefix) % 2 == 1]
    best = {a: max(odd, key=lambda b: float(unit[a] @ unit[b])) for a in even}
    return sorted(even, key=lambda a: -float(unit[a] @ unit[best[a]])), odd, best


def partition(labels: Tensor) -> set[frozenset[int]]:
    return {frozenset(torch.nonzero(labels == group).flatten().tolist()) for group in labels.unique()}


@settings(max_examples=50)
@given(
    seed=st.integers(0, 9**6),
    n=st.integers(2, 25),
    prefix=st.integers(0, 3),
    share=st.floats(0, 1),
    by_similarity=st.booleans(),
)
def test_tome_is_its_definition(seed: int, n: int, prefix: int, share: float, by_similarity: bool) -> None:
    features = torch.randn(2, n, 6, generator=torch.Generator().manual_seed(seed))
    n_merges = round(share * (n // 2))
    labels = match(torch.nn.functional.normalize(features, dim=-1), n_merges, prefix % 2, by_similarity)
    for b in range(2):
        stay = plain_tome_order(features[b], n_merges, prefix, by_similarity)
        assert labels[b, stay].tolist() == list(range(n - n_merges))
        assert partition(labels[b]) == plain_tome(features[b], n_merges, prefix)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_tome_hands_its_tokens_on_in_the_order_of_the_released_code(prefix: int) -> None:
    shown = view(n=12, prefix=prefix, target=8)
    assert shown.keys is not None
    keys = shown.keys.mean(1)[:, prefix:]
    grouping = ToMe().reduce(shown).grouping
    assert torch.equal(grouping.labels[:, :prefix], torch.arange(prefix).expand(2, -1))
    for b in range(2):
        stay = torch.tensor(plain_tome_order(keys[b], 4, prefix, by_similarity=prefix == 0))
        assert torch.equal(grouping.labels[b, prefix + stay], prefix + torch.arange(8))


@settings(max_examples=30)
@given(st.integers(0, 9**6), st.integers(1, 12), st.floats(0, 1))
def test_tome_is_tomesds_matching_where_they_coincide(seed: int, pairs: int, share: float) -> None:
    """On one row of cells of two, tomesd's destinations are the even tokens, and the odd ones look for them."""
    merge = pytest.importorskip("tomesd.merge")
    x = torch.randn(2, 2 * pairs, 6, generator=torch.Generator().manual_seed(seed))
    n_merges = round(share * pairs)
    there, back = merge.bipartite_soft_matching_random2d(x, w=2 * pairs, h=1, sx=2, sy=1, r=n_merges, no_rand=True)
    labels = match(torch.nn.functional.normalize(x, dim=-1), n_merges, first_seeker=1)
    grouping = Grouping.of(labels, 2 * pairs - n_merges)
    torch.testing.assert_close(grouping.unmerge(grouping.merge(x)), back(there(x, mode="mean")))


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
    assert shown.keys is not None
    keys = shown.keys.mean(1)[:, 1:]
    expected = agglo.cluster(keys, 5, linkage, backend="reference")
    assert torch.equal(grouping.labels[:, 1:] - 1, expected)
    assert torch.equal(grouping.labels[:, 0], torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("method", [ATC(), ToMe()])
def test_sizes_weigh_the_merge(method: Method) -> None:
    sizes = torch.tensor([1.0, *range(1, 13)]).expand(2, 13)
    grouping = method.reduce(view(n=12, sizes=sizes, target=7)).grouping
    assert grouping.sizes.sum(1).tolist() == [1 + 78.0] * 2
    assert grouping.n_groups == 8


def test_features_are_what_they_say() -> None:
    shown = view()
    assert shown.keys is not None
    assert shown.values is not None
    torch.testing.assert_close(shown.features("keys"), shown.keys.mean(1)[:, 1:])
    torch.testing.assert_close(shown.features("values"), shown.values.mean(1)[:, 1:])
    assert torch.equal(shown.features("tokens"), shown.tokens[:, 1:])
    per_head = shown.features("keys_per_head")
    cosines = torch.nn.functional.cosine_similarity(
        shown.keys[:, :, 1:, None], shown.keys[:, :, None, 1:], dim=-1
    ).mean(1)
    mean_cosine = torch.nn.functional.cosine_similarity(per_head[:, :, None], per_head[:, None], dim=-1)
    torch.testing.assert_close(mean_cosine, cosines)


def test_threshold_ignores_padding() -> None:
    """Image 0 has 9 real tokens and image 1 has 12: the same groups as without its padding."""
    counts = torch.tensor([9, 12])
    sizes = torch.ones(2, 13)
    sizes[0, 10:] = 0
    shown = view(n=12, target=None, threshold=0.6, sizes=sizes, counts=counts)
    grouping = ATC().reduce(shown).grouping
    assert shown.keys is not None
    assert grouping.counts is not None
    for image, count in enumerate(counts.tolist()):
        keys = shown.keys[image].mean(0)[1 : 1 + count]
        labels, groups = agglo.cluster(keys, threshold=0.6, backend="reference")
        assert torch.equal(grouping.labels[image, 1 : 1 + count] - 1, labels)
        assert grouping.counts[image] == groups
        assert (grouping.sizes[image] > 0).sum() == 1 + groups
    assert grouping.n_groups == 1 + int(grouping.counts.max())


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
    counts = trace.steps[0].total.counts
    assert counts is not None
    assert counts[0] < counts[1]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
    for index in range(2):
        torch.testing.assert_close(model(x[index : index + 1])[0], expected[index], rtol=0, atol=1e-5)
