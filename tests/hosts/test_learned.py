"""Methods that learn: what they learned outlives another apply, and nobody's parameters are lost in silence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import agglo
from agglo.methods.dynamic_vit import DynamicViT
from tests.support.reductions import lively_vit

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
LEARNED = [info.name for info in agglo.list_methods() if info.learns]


def deit() -> Any:
    return lively_vit(32, 4)


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "agglo_method" in name}


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def train(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    model.train()
    optimiser.zero_grad()
    with agglo.trace(model) as trace:
        loss = model(IMAGE).square().sum()
    (loss if trace.loss is None else loss + trace.loss).backward()
    optimiser.step()


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(first[name] is second[name] for name in first)


@pytest.mark.parametrize("name", LEARNED)
def test_an_optimiser_goes_on_with_a_method_applied_again(name: str) -> None:
    model = agglo.apply(deit(), name, keep_rate=0.5)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimiser)
    before, values = learned(model), {name: p.detach().clone() for name, p in learned(model).items()}
    assert before
    with no_warnings():
        agglo.apply(model, name, keep_rate=0.5)
    assert same(learned(model), before)
    assert all(torch.equal(p, values[key]) for key, p in learned(model).items())
    assert model.agglo_method.training
    train(model, optimiser)
    assert any(not torch.equal(p, values[key]) for key, p in learned(model).items())


@pytest.mark.parametrize("name", ["dynamicvit", "sit"])
def test_another_keep_rate_keeps_what_fits_and_says_what_does_not(name: str) -> None:
    model = agglo.apply(deit(), name, keep_rate=0.5)
    before, shapes = learned(model), {key: p.shape for key, p in learned(model).items()}
    if name == "dynamicvit":  # whose shapes go by the number of stages alone
        with no_warnings():
            agglo.apply(model, name, keep_rate=0.7)
        assert same(learned(model), before)
    else:
        with pytest.warns(UserWarning, match=name) as caught:
            agglo.apply(model, name, keep_rate=0.7)
        assert caught[0].filename == __file__
        assert {key: p.shape for key, p in learned(model).items()} != shapes


def test_other_options_and_other_methods_start_anew() -> None:
    model = agglo.apply(deit(), "dynamicvit", keep_rate=0.5)
    before = learned(model)
    with pytest.warns(UserWarning, match="ratio_weight"):
        agglo.apply(model, "dynamicvit", keep_rate=0.5, ratio_weight=3.0)
    assert not any(learned(model)[key] is p for key, p in before.items())
    agglo.apply(model, "dynamicvit_prsv", keep_rate=0.5)
    assert model.agglo_method.name == "dynamicvit_prsv"
    agglo.apply(model, "tome", keep_rate=0.5)
    assert not learned(model)


def test_an_instance_is_built_once() -> None:
    method = DynamicViT()
    model = agglo.apply(deit(), method, keep_rate=0.5)
    assert model.agglo_method is method
    before, state = learned(model), torch.random.get_rng_state()
    agglo.apply(model, method, keep_rate=0.7)
    assert torch.equal(torch.random.get_rng_state(), state), "looking whether it fits draws no random numbers"
    with pytest.raises(ValueError, match="predictors"):
        agglo.apply(model, method, keep_rate=0.7, blocks=(2,))
    assert model.agglo_method is method
    assert same(learned(model), before)


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_distributed_wrapper_must_come_after_the_parameters() -> None:
    wrapped = nn.parallel.DistributedDataParallel(deit())
    keys = list(wrapped.state_dict())
    for given in ("dynamicvit", DynamicViT()):
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            agglo.apply(wrapped, given, keep_rate=0.5)
    assert agglo.report(wrapped) is None
    assert list(wrapped.state_dict()) == keys
    agglo.apply(wrapped, "atc", keep_rate=0.5)
    assert agglo.report(wrapped) is not None
    both = nn.ModuleDict({"wrapped": wrapped, "bare": deit()})  # another part of the model may be wrapped
    assert learned(agglo.apply(both, "dynamicvit", keep_rate=0.5, tower="bare"))


def test_a_data_parallel_replica_runs_its_own_method() -> None:
    """torch puts copies of the submodules, on another device, into a replica that shares all other attributes."""
    model = agglo.apply(deit(), "sit", keep_rate=0.5).eval()
    replica: Any = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        replica._modules[name] = copy.deepcopy(child)
    replica._parameters = model._parameters
    for parameter in replica.agglo_method.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        ours, theirs = model(IMAGE), replica(IMAGE)
    assert not torch.allclose(ours, theirs)
