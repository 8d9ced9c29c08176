"""What holds for every diffusion model that agglo reduces."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.testing import assert_same
from tests.support.diffusion import MODELS, Whole, diffusers, run, unet

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.parametrize("proportional", [True, False])
def test_groups_of_one_token_change_nothing(name: str, proportional: bool) -> None:
    model, inputs = MODELS[name]()
    dense = run(model, inputs)
    agglo.apply(model, Whole(), keep_rate=0.5, proportional=proportional, max_downsample=8)
    assert_same(run(model, inputs), dense, atol=1e-5)


@every_model
def test_removal_is_exact(name: str) -> None:
    model, inputs = MODELS[name]()
    dense, state = run(model, inputs), copy.deepcopy(model.state_dict())
    before = [(type(module), set(vars(module))) for module in model.modules()]
    assert torch.equal(run(agglo.apply(model, keep_rate=1.0), inputs), dense)
    agglo.apply(model, keep_rate=0.4, max_downsample=8)
    assert (run(model, inputs) - dense).abs().max() > 1e-4
    assert list(model.state_dict()) == list(state)
    assert agglo.report(model, n_tokens=64) is not None
    assert agglo.remove(model) is model
    after = [(type(module), set(vars(module))) for module in model.modules()]
    assert all(now is then for (now, _), (then, _) in zip(after, before, strict=True))
    assert [names for _, names in after] == [names for _, names in before]
    assert torch.equal(run(model, inputs), dense)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert agglo.report(model) is None


@every_model
def test_copies_and_pickles_are_reduced_too(name: str) -> None:
    model, inputs = MODELS[name]()
    agglo.apply(model, keep_rate=0.5)
    reduced = run(model, inputs)
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    agglo.remove(model)
    assert torch.equal(run(twin, inputs), reduced)
    assert torch.equal(run(thawed, inputs), reduced)
    assert not torch.equal(run(model, inputs), reduced)


@pytest.mark.parametrize("name", ["unet_of_maps", "flux"])
def test_threads_do_not_mix(name: str) -> None:
    model, inputs = MODELS[name]()
    agglo.apply(model, keep_rate=0.5)
    main = next(value for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 2)
    key = next(key for key, value in inputs.items() if value is main)
    variants = [{**inputs, key: main * factor} for factor in (1.0, -0.5, 2.0)]
    alone = [run(model, variant) for variant in variants]
    together: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        together[number] = [run(model, variants[number]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate(alone):
        assert len(together[number]) == 4
        for result in together[number]:
            assert_same(result, expected, atol=1e-6)


@every_model
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


def _shallow(name: str) -> tuple[Any, dict[str, Any]]:
    """One block: tracing is what compilation takes its time for. Others have the attentions of these models."""
    if name == "unet":
        types = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
        return unet(block_out_channels=(16,), **types)
    model, inputs = MODELS[name]()
    if name == "wan":
        del model.blocks[1:]
    elif name == "flux":
        del model.single_transformer_blocks[1:]
    return model, inputs


@pytest.mark.parametrize("name", ["unet", "unet_of_maps", "flux", "wan"])
def test_compiled_in_one_graph(name: str) -> None:
    model, inputs = _shallow(name)
    agglo.apply(model, keep_rate=0.5)
    eager = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(run(compiled, inputs), eager, atol=1e-5)


@pytest.mark.parametrize("name", ["unet", "dit"])
def test_gradients_flow_to_the_input(name: str) -> None:
    model, inputs = MODELS[name]()
    agglo.apply(model, keep_rate=0.5)
    key = next(iter(inputs))
    inputs[key].requires_grad_(True)
    model(**inputs).sample.square().sum().backward()
    assert inputs[key].grad.isfinite().all()
    assert inputs[key].grad.abs().sum() > 0
    for parameter_name, parameter in model.named_parameters():
        if "attn1.to_q" in parameter_name:
            assert parameter.grad.abs().sum() > 0


@every_model
def test_a_trace_tells_the_grid_of_every_self_attention(name: str) -> None:
    model, inputs = MODELS[name]()
    agglo.apply(model, keep_rate=0.5, max_downsample=8)
    with agglo.trace(model) as trace:
        run(model, inputs)
    assert [step.block for step in trace.steps] == list(range(len(trace.steps)))
    counts = agglo.report(model, n_tokens=64).counts  # type: ignore[union-attr]
    assert len(trace.steps) == len(counts)
    for step in trace.steps:
        rows, columns = step.grid  # type: ignore[attr-defined]
        assert step.total.labels.shape == (2, rows * columns)
        assert step.total.n_groups == -(-rows * columns // 2)
        assert step.total.sizes.sum(dim=1).tolist() == [rows * columns] * 2


def test_what_is_not_supported_is_named() -> None:
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    with pytest.raises(agglo.UnsupportedModelError, match="AutoencoderKL"):
        agglo.apply(model, keep_rate=0.5)


def test_u_nets_over_time_are_not_supported() -> None:
    model = diffusers.UNet3DConditionModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )
    with pytest.raises(agglo.UnsupportedModelError, match="layers over time"):
        agglo.apply(model, keep_rate=0.5)
