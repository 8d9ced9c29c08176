"""`method="tomesd"` against tomesd itself, side by side on the same U-Net with the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.testing import assert_same
from tests.support.diffusion import run, unet

tomesd: Any = pytest.importorskip("tomesd")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rand": False, "merge_crossattn": True, "merge_mlp": True},
        {"sx": 4, "sy": 3, "ratio": 0.8},
        {"size": (12, 8), "max_downsample": 2},
        {"batch": 3},
    ],
)
def test_side_by_side(options: dict[str, Any]) -> None:
    options = dict(options)
    model, inputs = unet(options.pop("size", (8, 8)), options.pop("batch", 2))
    ratio = options.get("ratio", 0.5)
    torch.manual_seed(7)
    tomesd.apply_patch(model, **{"ratio": ratio, **options})
    expected = [run(model, inputs) for _ in range(3)]
    tomesd.remove_patch(model)
    torch.manual_seed(7)
    parts = ["attn", *(["cross"] * options.get("merge_crossattn", 0)), *(["mlp"] * options.get("merge_mlp", 0))]
    agglo.apply(
        model,
        "tomesd",
        keep_rate=1 - ratio,
        max_downsample=options.get("max_downsample", 1),
        merge=parts,
        stride=(options.get("sy", 2), options.get("sx", 2)),
        use_rand=options.get("use_rand", True),
    )
    for reference in expected:
        assert_same(run(model, inputs), reference, atol=5e-6)
    draws = options.get("use_rand", True) and len(expected[0]) % 2 == 0
    assert torch.equal(expected[0], expected[1]) != draws


def test_the_whole_batch_has_the_same_destinations() -> None:
    model, inputs = unet()
    same = {
        key: value[:1].repeat(2, *[1] * (value.dim() - 1)) if value.dim() else value for key, value in inputs.items()
    }
    agglo.apply(model, "tomesd", keep_rate=0.3)
    before = torch.get_rng_state()
    with agglo.trace(model) as trace:
        run(model, same)
    assert torch.equal(torch.get_rng_state(), before)
    for grouping in trace.groupings.values():
        assert torch.equal(grouping.labels[0], grouping.labels[1])


def drawn(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with agglo.hosts.diffusers.generation():
        return run(model, inputs)


def test_a_seed_makes_generations_the_same() -> None:
    model, inputs = unet()
    agglo.apply(model, "tomesd", keep_rate=0.3, seed=3)
    first, second = drawn(model, inputs), drawn(model, inputs)
    assert torch.equal(first, second)
    agglo.apply(model, "tomesd", keep_rate=0.3, seed=4)
    assert not torch.equal(drawn(model, inputs), first)
    with agglo.hosts.diffusers.generation():
        steps = [run(model, inputs) for _ in range(2)]
    assert not torch.equal(steps[0], steps[1])


def test_fewer_than_one_per_cell_is_refused() -> None:
    model, _ = unet()
    with pytest.raises(ValueError, match="tomesd cannot go from 8 x 8 tokens to 13"):
        agglo.apply(model, "tomesd", keep_rate=0.2)
    agglo.apply(model, "tomesd", keep_rate=0.2, stride=(4, 2))


def test_not_on_top_of_tomesd() -> None:
    model, inputs = unet()
    dense = run(model, inputs)
    tomesd.apply_patch(model, ratio=0.5)
    with pytest.raises(agglo.UnsupportedModelError, match=r"tomesd\.remove_patch"):
        agglo.apply(model, keep_rate=0.5)
    tomesd.remove_patch(model)
    assert torch.equal(run(model, inputs), dense)
