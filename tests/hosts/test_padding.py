"""Padded batches: what shows an image never merges with what shows padding alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import agglo
from agglo.hosts.common.padding import RealPatches, reduce_apart
from tests.support.adapters import small_adapter
from tests.support.reductions import view

SIZES = [(64, 64), (41, 64), (64, 30), (17, 9)]  # within 64 x 64: 64, 48, 32 and 6 of 64 patches
MIXING = ["atc", "tome", "kmedoids", "pool", "evit", "pitome", "tofu", "mctf", "mutual"]


def padded_batch(sizes: list[tuple[int, int]] = SIZES) -> Tensor:
    images = torch.randn(len(sizes), 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for image, (height, width) in zip(images, sizes, strict=True):
        image[:, height:] = 0
        image[:, :, width:] = 0
    return images


def real_patches(sizes: list[tuple[int, int]] = SIZES) -> Tensor:
    real = torch.zeros(len(sizes), 8, 8, dtype=torch.bool)
    for each, (height, width) in zip(real, sizes, strict=True):
        each[: -(-height // 8), : -(-width // 8)] = True
    return real.flatten(1)


def applied(text: str) -> Any:
    adapter = small_adapter(class_token=text == "evit", nominal_size=(64, 64))
    torch.manual_seed(0)
    return agglo.apply(adapter, text, keep_rate=0.5)


@pytest.mark.parametrize("text", MIXING)
@torch.no_grad()
def test_no_group_holds_both(text: str) -> None:
    adapter, real = applied(text), real_patches()
    with agglo.trace(adapter) as trace:
        maps = adapter(padded_batch(), SIZES)
    assert all(m.isfinite().all() for m in maps)
    assert len(trace.groupings) == 3
    for grouping in trace.groupings.values():
        labels = grouping.labels[:, adapter.prefix :]
        for image in range(len(SIZES)):
            shown = set(labels[image][real[image]].tolist())
            hidden = set(labels[image][~real[image]].tolist())
            assert not shown & hidden
            assert shown
            assert min(shown) >= adapter.prefix
        ones = torch.ones(grouping.labels.shape)
        torch.testing.assert_close(
            torch.zeros_like(grouping.sizes).scatter_add(1, grouping.labels, ones), grouping.sizes
        )


@pytest.mark.parametrize("text", ["atc", "dpc_knn"])
@torch.no_grad()
def test_every_image_keeps_as_many_as_without_padding(text: str) -> None:
    adapter = applied(text)
    with agglo.trace(adapter) as trace:
        adapter(padded_batch(), SIZES)
    assert [g.n_groups for g in trace.groupings.values()] == [32, 16, 8]
    assert all(g.counts is None and (g.sizes > 0).all() for g in trace.groupings.values())
    shares = [len(set(trace.groupings[2].labels[i][real_patches()[i]].tolist())) for i in range(4)]
    assert shares == [32, 24, 16, 3]  # half of 64, 48, 32 and 6


@torch.no_grad()
def test_sizes_make_no_difference_where_nothing_is_padded() -> None:
    images, adapter = padded_batch(), applied("atc")
    full = [(64, 64), (57, 63), (64, 64), (60, 60)]  # the last patches show something
    torch.testing.assert_close(adapter(images, full), adapter(images), rtol=0, atol=0)
    assert not torch.allclose(adapter(images, SIZES)[2], adapter(images)[2])


def canonical(labels: Tensor) -> list[int]:
    """Groups numbered by their first member."""
    names: dict[int, int] = {}
    return [names.setdefault(int(label), len(names)) for label in labels]


@settings(max_examples=15)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    rate=st.sampled_from([0.3, 0.5, 0.7, 0.9]),
    prefix=st.integers(0, 2),
    linkage=st.sampled_from(["average", "single", "complete"]),
    seed=st.integers(0, 50),
)
def test_an_images_groups_are_those_of_its_tokens_alone(
    rows: int, columns: int, rate: float, prefix: int, linkage: str, seed: int
) -> None:
    """Two stages of ATC: groups and tokens are those of a batch that holds nothing but the image's tokens."""
    real = torch.zeros(2, 5, 5, dtype=torch.bool)
    real[0, :rows, :columns] = True
    real[1, :3, :4] = True
    real = real.flatten(1)
    method = agglo.methods.create("atc", linkage=linkage, features="tokens")
    first = shown = view(seed, n=25, prefix=prefix, grid=(5, 5))
    patches, totals = RealPatches(real), []  # type: ignore[var-annotated]
    for target in (int(25 * rate), max(2, int(25 * rate * rate))):
        total = totals[-1] if totals else None
        shown = replace(shown, target=target, sizes=None if total is None else total.sizes)
        outcome, patches = reduce_apart(method, shown, patches, total)
        totals.append(outcome.grouping if total is None else total.then(outcome.grouping))
        assert outcome.tokens is not None
        shown = replace(shown, tokens=outcome.tokens, stage=shown.stage + 1)
    for image in range(2):
        here = torch.cat([torch.arange(prefix), real[image].nonzero().flatten() + prefix])
        alone = replace(first, tokens=first.tokens[image : image + 1, here], attention_received=None)
        total = None
        for in_batch in totals:
            labels = in_batch.labels[image, here]
            target = labels.unique().numel() - prefix
            grouping = method.reduce(
                replace(alone, target=target, sizes=None if total is None else total.sizes)
            ).grouping
            total = grouping if total is None else total.then(grouping)
            alone = replace(alone, tokens=grouping.merge(alone.tokens))
            assert canonical(total.labels[0]) == canonical(labels)
        torch.testing.assert_close(
            totals[-1].unmerge(shown.tokens)[image, here],
            total.unmerge(alone.tokens)[0],  # type: ignore[union-attr]
        )


@torch.no_grad()
def test_a_threshold_finds_what_it_finds_alone() -> None:
    adapter = agglo.apply(small_adapter(), threshold=0.3)
    images, real = padded_batch(), real_patches()
    with agglo.trace(adapter) as trace:
        adapter(images, SIZES)
    groupings = dict(trace.groupings)
    counts = groupings[2].counts
    assert counts is not None and len(set(counts.tolist())) > 1
    for image in range(len(SIZES)):
        with agglo.trace(adapter) as trace:
            adapter(images[image : image + 1], SIZES[image : image + 1])
        for block, grouping in trace.groupings.items():
            together = groupings[block].labels[image]
            assert canonical(grouping.labels[0]) == canonical(together)
            assert not set(together[real[image]].tolist()) & set(together[~real[image]].tolist())
            sizes = groupings[block].sizes[image]
            assert not ((sizes[:-1] == 0) & (sizes[1:] > 0)).any()  # what only fills up comes last


@torch.no_grad()
def test_methods_that_merge_nothing_treat_padding_like_the_rest() -> None:
    adapter, images = applied("random:seed=1"), padded_batch()
    torch.testing.assert_close(adapter(images, SIZES), adapter(images), rtol=0, atol=0)


@torch.no_grad()
def test_soft_methods_say_why_they_cannot() -> None:
    with pytest.raises(ValueError, match="without padding"):
        applied("sit")(padded_batch(), SIZES)


@torch.no_grad()
def test_an_image_of_one_pixel() -> None:
    sizes = [(64, 64), (1, 1)]
    for text in MIXING:
        maps = applied(text)(padded_batch(sizes), sizes)
        assert all(m.isfinite().all() for m in maps), text
