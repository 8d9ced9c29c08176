"""What holds for every diffusion model that agglo reduces."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.testing import assert_same
from tests.support.diffusion import MODELS, Whole, diffusers, run, unet_of_maps

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.parametrize("proportional", [True, False])
def test_groups_of_one_token_change_nothing(name: str, proportional: bool) -> None:
    model, inputs = MODELS[name]()
    dense = run(model, inputs)
    agglo.apply(model, Whole(), keep_rate=0.5, proportional=proportional, max_downsample=8)
    assert_same(run(model, inputs), dense, atol=1e-5)


@every_model
def test_every_self_attention_is_reduced_and_removal_is_exact(name: str) -> None:
    model, inputs = MODELS[name]()
    dense, state = run(model, inputs), copy.deepcopy(model.state_dict())
    before = [(type(module), set(vars(module))) for module in model.modules()]
    assert torch.equal(run(agglo.apply(model, keep_rate=1.0), inputs), dense)
    agglo.apply(model, keep_rate=0.5, max_downsample=8)
    with agglo.trace(model) as trace:
        assert (run(model, inputs) - dense).abs().max() > 1e-4
    for number, step in enumerate(trace.steps):
        rows, columns = step.grid  # type: ignore[attr-defined]
        assert step.block == number
        assert step.total.labels.shape == (2, rows * columns)
        assert step.total.n_groups == -(-rows * columns // 2)
    assert list(model.state_dict()) == list(state)
    assert len(agglo.report(model, n_tokens=64).counts) == len(trace.steps)  # type: ignore[union-attr,arg-type]
    assert agglo.remove(model) is model
    after = [(type(module), set(vars(module))) for module in model.modules()]
    assert all(now is then for (now, _), (then, _) in zip(after, before, strict=True))
    assert [names for _, names in after] == [names for _, names in before]
    assert torch.equal(run(model, inputs), dense)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert agglo.report(model) is None


@pytest.mark.parametrize("name", ["unet", "unet_of_maps", "wan"])
def test_copies_and_pickles_are_reduced_too(name: str) -> None:
    model, inputs = MODELS[name]()
    agglo.apply(model, keep_rate=0.5)
    reduced = run(model, inputs)
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    agglo.remove(model)
    assert torch.equal(run(twin, inputs), reduced)
    assert torch.equal(run(thawed, inputs), reduced)
    assert not torch.equal(run(model, inputs), reduced)


@pytest.mark.parametrize(("name", "options"), [("unet_of_maps", {"every": 2}), ("flux", {})])
def test_threads_do_not_mix(name: str, options: dict[str, Any]) -> None:
    """Neither their passes nor their generations."""
    model, inputs = MODELS[name]()
    agglo.apply(model, keep_rate=0.5, **options)
    key, main = next((key, value) for key, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 2)
    times = [torch.full_like(inputs["timestep"], time) for time in (3, 2, 1)]

    def steps(factor: float) -> list[Tensor]:
        with agglo.hosts.diffusers.generation():
            return [run(model, {**inputs, key: main * factor**time, "timestep": times[time]}) for time in range(3)]

    factors = (1.0, -0.5, 2.0)
    alone = [steps(factor) for factor in factors]
    with ThreadPoolExecutor(3) as pool:
        assert_same(list(pool.map(steps, factors)), alone, atol=1e-6)


@pytest.mark.parametrize("name", ["unet", "sd3", "flux", "ltx"])
def test_bfloat16(name: str) -> None:
    model, inputs = MODELS[name]()
    dense = run(model, inputs)
    floats = {key: _to(value, torch.bfloat16) for key, value in inputs.items()}
    model.to(torch.bfloat16)
    half_dense = run(model, floats).float()
    result = run(agglo.apply(model, keep_rate=0.5), floats)
    assert result.dtype == torch.bfloat16
    assert result.isfinite().all()
    assert (result.float() - half_dense).norm() < 0.3 * dense.norm()


def _to(value: Any, dtype: torch.dtype) -> Any:
    keep = not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2
    return value if keep else value.to(dtype)


@pytest.mark.parametrize("name", ["unet_of_maps", "flux", "wan"])
def test_compiled_in_one_graph(name: str) -> None:
    """As few blocks as there can be: tracing is what takes the time."""
    model, inputs = unet_of_maps(("DownBlock2D",), ("UpBlock2D",)) if name == "unet_of_maps" else MODELS[name]()
    if name == "wan":
        del model.blocks[1:]
    elif name == "flux":
        del model.single_transformer_blocks[1:]
    agglo.apply(model, keep_rate=0.5)
    eager = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(run(compiled, inputs), eager, atol=1e-5)


def test_gradients_flow_to_the_input() -> None:
    model, inputs = MODELS["unet"]()
    agglo.apply(model, keep_rate=0.5)
    sample = inputs["sample"].requires_grad_(True)
    model(**inputs).sample.square().sum().backward()
    assert sample.grad.isfinite().all()
    assert sample.grad.abs().sum() > 0
    for parameter_name, parameter in model.named_parameters():
        if "attn1.to_q" in parameter_name:
            assert parameter.grad.abs().sum() > 0


def test_what_is_not_supported_is_named() -> None:
    with pytest.raises(agglo.UnsupportedModelError, match="AutoencoderKL"):
        agglo.apply(diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4), keep_rate=0.5)
    small = {"layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 4}
    types = {"down_block_types": ("CrossAttnDownBlock3D",), "up_block_types": ("CrossAttnUpBlock3D",)}
    with pytest.raises(agglo.UnsupportedModelError, match="layers over time"):
        agglo.apply(diffusers.UNet3DConditionModel(block_out_channels=(8,), **small, **types), keep_rate=0.5)
