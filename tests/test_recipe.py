"""`flops=`: a budget that the recipe meets from below, for any depth, token count and head."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agglo
from agglo.budget import recipe_schedule
from agglo.methods.atc import ATC

MODELS = {
    "class token": ("deit_tiny_patch16_224", {}),
    "distillation token": ("deit_tiny_distilled_patch16_224", {}),
    "pools patches": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "no class token": ("vit_base_patch16_siglip_224", {"depth": 6}),
    "registers, rotary": ("vit_small_patch16_dinov3", {"depth": 5}),
    "deep": ("vit_tiny_patch16_224", {"depth": 24, "img_size": 384}),
}


@cache
def model(kind: str) -> Any:
    name, options = MODELS[kind]
    return timm.create_model(name, **options).eval()


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=10, deadline=None)
@given(flops=st.floats(0.4, 0.9))
def test_the_budget_is_met_from_below_to_one_percent(kind: str, flops: float) -> None:
    reduced = agglo.apply(model(kind), flops=flops)
    report = agglo.report(reduced)
    assert flops - 0.01 < report.gflops_after / report.gflops_before <= flops
    share_of_larger = agglo.report(reduced, n_tokens=4 * report.n_tokens)
    assert share_of_larger.gflops_after / share_of_larger.gflops_before == pytest.approx(flops, abs=0.05)
    agglo.remove(reduced)


@pytest.mark.parametrize("method", ["atc", "tome", "topk"])
def test_apply_takes_the_recipe(method: str) -> None:
    config = agglo.recipe(model("class token"), method, flops=0.6)
    assert agglo.report(agglo.apply(model("class token"), method, flops=0.6)).config == config
    assert config.flops is None and config.schedule is not None
    assert config.last_block == "class_token"
    assert agglo.report(agglo.apply(model("class token"), config)).config == config
    agglo.remove(model("class token"))


def test_importance_is_attention_received_where_no_head_reads_the_class_token_alone() -> None:
    found = {kind: agglo.recipe(model(kind), flops=0.6) for kind in MODELS}
    reads_class_token = ("class token", "distillation token", "deep")
    for kind, config in found.items():
        assert config.options["importance"] == ("class" if kind in reads_class_token else "received")
        assert config.last_block == ("class_token" if kind in reads_class_token else "all")


def test_what_is_given_stays() -> None:
    config = agglo.recipe(model("class token"), flops=0.6, linkage="complete", importance="received")
    assert config.options["linkage"] == "complete" and config.options["importance"] == "received"
    method = ATC(linkage="single")
    reduced = agglo.apply(model("class token"), method, flops=0.6)
    assert "linkage='single'" in agglo.report(reduced).method
    agglo.remove(reduced)


@pytest.mark.parametrize("kind", ["class token", "no class token", "registers, rotary"])
def test_outputs_are_finite_and_keep_their_shape(kind: str) -> None:
    images = torch.rand(2, 3, *model(kind).patch_embed.img_size)
    with torch.inference_mode():
        dense = model(kind)(images)
        reduced = agglo.apply(model(kind), flops=0.5)(images)
    agglo.remove(model(kind))
    assert reduced.shape == dense.shape and bool(reduced.isfinite().all()) and not torch.equal(reduced, dense)


def test_what_cannot_be_met_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        agglo.recipe(model("class token"), flops=0.1)
    with pytest.raises(ValueError, match="output"):
        agglo.apply(model("class token"), flops=0.5, output="merged")
    with pytest.raises(ValueError, match="atc"):  # ToMe merges at most half of the tokens at a block
        agglo.recipe(model("class token"), "tome", flops=0.1)


@given(depth=st.integers(1, 40), flops=st.floats(0.05, 1), amount=st.floats(0.01, 1))
def test_the_schedule_fits_every_depth(depth: int, flops: float, amount: float) -> None:
    counts = recipe_schedule(depth, flops, amount).counts(10_000, depth)
    assert counts[-1] == pytest.approx(10_000 * amount, rel=0.02, abs=40)
    assert all(before >= after for before, after in pairwise(counts))
