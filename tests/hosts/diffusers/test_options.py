"""The options of apply for diffusion models, and the report."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agglo
from agglo.hosts.diffusers import applying
from agglo.lab.bench.diffusion import random_unet
from agglo.testing import assert_same
from tests.support.diffusion import dit, flux, pipeline, run, sd3, unet, unet_of_maps


@pytest.mark.parametrize("described", ["tomesd", "pool", "l2", "kmedoids:weights=equal", "mutual"])
def test_methods_that_group_tokens(described: str) -> None:
    model, inputs = unet()
    dense = run(model, inputs)
    result = run(agglo.apply(model, described, keep_rate=0.6), inputs)
    assert result.isfinite().all()
    assert not torch.equal(result, dense)


def test_local_clustering_is_that_of_cluster() -> None:
    model, inputs = unet((8, 12))
    agglo.apply(model, keep_rate=0.5, features="tokens", window=4)
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    seen: dict[str, Any] = {}
    block.register_forward_pre_hook(lambda module, args: seen.update(tokens=args[0]))
    with agglo.trace(model) as trace:
        run(model, inputs)
    expected = agglo.cluster(seen["tokens"], 48, grid=(8, 12), window=4)
    assert torch.equal(trace.groupings[0].labels, expected)


SIDES = st.tuples(st.integers(3, 12), st.integers(3, 12)).map(lambda sides: (2 * sides[0], 2 * sides[1]))


@given(grid=SIDES, keep_rate=st.sampled_from([0.01, 0.3, 0.7]), window=st.sampled_from([None, "all"]))
@settings(max_examples=12, deadline=None)
def test_tokens_are_clustered_in_windows_unless_told_otherwise(grid: Any, keep_rate: float, window: Any) -> None:
    model, inputs = unet(grid)
    agglo.apply(model, keep_rate=keep_rate, features="tokens", window=window)
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    seen: dict[str, Any] = {}
    block.register_forward_pre_hook(lambda module, args: seen.update(tokens=args[0]))
    with agglo.trace(model) as trace:
        run(model, inputs)
    n_groups = math.ceil(grid[0] * grid[1] * keep_rate - 1e-9)
    n_windows = math.ceil(grid[0] / 16) * math.ceil(grid[1] / 16)
    where = {} if window == "all" or n_groups < n_windows else {"grid": grid, "window": 16}
    assert torch.equal(trace.groupings[0].labels, agglo.cluster(seen["tokens"], n_groups, **where))


def test_the_report_says_where_tokens_are_clustered_in_windows() -> None:
    def windows(**options: Any) -> list[Any]:
        model, _ = unet()
        agglo.apply(model, keep_rate=0.5, max_downsample=2, **options)
        return [level.window for level in agglo.report(model, n_tokens=32 * 32).levels]  # type: ignore[union-attr]

    assert windows() == [16, None]  # 16 x 16 tokens are one window
    assert windows(window="all") == windows(connectivity="grid") == windows(method="tomesd") == [None, None]
    assert windows(window=(8, 4))[0] == (8, 4)
    model, _ = unet(sample_size=(24, 40))
    assert "480 in windows of 16 x 16" in str(agglo.report(agglo.apply(model, keep_rate=0.5)))


@pytest.mark.parametrize(
    ("make", "features"), [(unet, "keys"), (dit, "keys_per_head"), (sd3, "keys"), (unet, "values")]
)
def test_keys_that_were_compared_are_not_projected_again(make: Any, features: str) -> None:
    """The means of keys are the keys of the means; with gradients, or watched, the layer runs on the means."""
    model, inputs = make()
    agglo.apply(model, keep_rate=0.5, features=features)
    with torch.enable_grad():
        expected = model(**inputs, return_dict=False)[0].detach()
    with torch.no_grad():
        assert_same(model(**inputs, return_dict=False)[0], expected, atol=1e-5)
    layer = next(module for name, module in model.named_modules() if name.endswith((".attn1.to_k", ".attn.to_k")))
    original = torch.nn.Linear.forward
    spied = mock.patch.object(torch.nn.Linear, "forward", autospec=True, side_effect=original)
    with agglo.trace(model) as trace, spied as linear:
        run(model, inputs)
    whole, merged = trace.groupings[0].labels.shape[1], trace.groupings[0].n_groups
    projected = [call.args[1].shape[1] for call in linear.call_args_list if call.args[0] is layer]
    assert projected == ([merged] if features == "values" else [whole])
    seen: list[int] = []
    layer.register_forward_hook(lambda module, args, result: seen.append(args[0].shape[1]))
    run(model, inputs)
    assert seen == ([merged] if features == "values" else [whole, merged])


def test_merging_that_cannot_pay_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """64 tokens of 16 channels have nothing to save; 4096 of 320 have."""
    applying._say_that_little_is_saved.cache_clear()
    for _ in range(2):
        agglo.apply(unet()[0], keep_rate=0.5)
    assert ["UNet2DConditionModel" in record.getMessage() for record in caplog.records] == [True]
    applying._say_that_little_is_saved.cache_clear()
    caplog.clear()
    agglo.apply(unet()[0], keep_rate=1.0)
    with torch.device("meta"):
        agglo.apply(random_unet("sd15", 64), keep_rate=0.5)
    assert not caplog.records


def test_merged_tokens_keep_their_length() -> None:
    model, inputs = unet()
    agglo.apply(model, keep_rate=0.5, mean="preserve_norm", merge=("attn", "mlp"))
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    seen: dict[str, Any] = {}
    for name, (norm, layer) in {"attn": (block.norm1, block.attn1.to_q), "mlp": (block.norm3, block.ff.net[0])}.items():
        norm.register_forward_hook(lambda module, args, result, name=name: seen.update({f"{name} tokens": result}))
        layer.register_forward_pre_hook(lambda module, args, name=name: seen.update({name: args[0]}))
    with agglo.trace(model) as trace:
        run(model, inputs)
    for name in ("attn", "mlp"):
        expected = trace.groupings[0].merge(seen[f"{name} tokens"], "preserve_norm")
        torch.testing.assert_close(seen[name], expected)
        assert not torch.allclose(expected, trace.groupings[0].merge(seen[f"{name} tokens"]), rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "keep_rate"),
        ({"keep_rate": [0.5, 0.4]}, "keep_rate="),
        ({"blocks": [1]}, "blocks="),
        ({"keep_rate": None, "threshold": 0.5}, "threshold="),
        ({"output": "merged"}, "output="),
        ({"importance": "received"}, "attention weights"),
        *(({"method": name}, f"method '{name}'") for name in ("tome", "evit", "dynamicvit", "sinkhorn", "svit")),
    ],
)
def test_refused_before_anything_changes(options: dict[str, Any], message: str) -> None:
    model, inputs = unet()
    dense = run(model, inputs)
    with pytest.raises(ValueError, match=message):
        agglo.apply(model, **({"keep_rate": 0.5, **options} if options else {}))
    assert torch.equal(run(model, inputs), dense)
    assert agglo.report(model) is None


def test_parts_that_a_model_does_not_have() -> None:
    for make, part in ((dit, "cross"), (sd3, "cross"), (flux, "mlp"), (unet_of_maps, "mlp")):
        with pytest.raises(ValueError, match=f"merge='{part}'"):
            agglo.apply(make()[0], keep_rate=0.5, merge=("attn", part))


def test_resolutions() -> None:
    model, inputs = unet()
    for max_downsample, blocks in ((None, [0, 5, 6]), (1, [0, 5, 6]), (2, [0, 1, 2, 3, 4, 5, 6])):
        agglo.apply(model, keep_rate=0.5, max_downsample=max_downsample)
        with agglo.trace(model) as trace:
            run(model, inputs)
        assert [step.block for step in trace.steps] == blocks
    # As SDXL, without attention at its finest resolution: tomesd does nothing there, and does not say so.
    types = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    model, inputs = unet(**types, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
    dense = run(model, inputs)
    with pytest.raises(ValueError, match="max_downsample=1"):
        agglo.apply(model, keep_rate=0.5, max_downsample=1)
    assert not torch.equal(run(agglo.apply(model, keep_rate=0.5), inputs), dense)
    assert [level.tokens for level in agglo.report(model).levels] == [16]  # type: ignore[union-attr]


def test_reduction_counts_tokens_and_work() -> None:
    model, _ = unet()
    agglo.apply(model, keep_rate=0.5, proportional=False, features="tokens", max_downsample=1)
    found: Any = agglo.report(model)
    assert found.counts == [32, 16, 16, 16, 16, 32, 32]
    assert [(level.downsample, level.attentions, level.tokens, level.groups) for level in found.levels] == [
        (1, 3, 64, 32),
        (2, 4, 16, 16),
    ]

    def madds(tokens: int, width: int) -> int:
        return 4 * tokens * width * width + 2 * tokens * tokens * width

    coarse = 4 * madds(16, 32)
    assert found.gflops_before == pytest.approx((3 * madds(64, 16) + coarse) / 1e9)
    assert found.gflops_after == pytest.approx((3 * madds(32, 16) + coarse) / 1e9)
    assert "3 self-attentions at 1/1: 64 -> 32; 4 self-attentions at 1/2: 16 -> 16 tokens" in str(found)
    keys: Any = agglo.report(agglo.apply(model, keep_rate=0.5))
    # Keys of all tokens are projected to be compared, and those of the groups are their means.
    assert keys.gflops_after == pytest.approx(found.gflops_after + 3 * (64 - 32) * 16 * 16 / 1e9)
    values: Any = agglo.report(agglo.apply(model, keep_rate=0.5, features="values"))
    assert values.gflops_after == pytest.approx(found.gflops_after + 3 * 64 * 16 * 16 / 1e9)


def test_reduction_of_a_pipeline_and_of_other_sizes() -> None:
    pipe = pipeline()
    assert agglo.report(pipe) is None
    agglo.apply(pipe, "pool", keep_rate=0.3)
    assert agglo.report(pipe).counts[0] == 16  # type: ignore[union-attr,index]
    assert agglo.report(pipe, n_tokens=256).counts[0] == 81  # type: ignore[union-attr,index]
    model, _ = flux()
    agglo.apply(model, keep_rate=0.25)
    with pytest.raises(ValueError, match="n_tokens"):
        agglo.report(model)
    assert agglo.report(model, n_tokens=4096).counts == [1024] * 3  # type: ignore[union-attr]
