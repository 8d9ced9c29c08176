"""What docs/deploying.md says of DDP and FSDP, with two processes: a model in one process shards nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import agglo
from tests.support.families import FAMILIES
from tests.support.processes import torchrun

BY_ITSELF = r"{} of this \w+ is sharded by itself.*agglo\.apply\(model, \.\.\.\), then fully_shard\(model\)"


Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two processes found."""
    pytest.importorskip("timm", reason="the model is timm's")
    folder = tmp_path_factory.mktemp("ranks")
    torchrun("-m", "tests.hosts.two_processes", str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far apart gradients are, as a fraction of the largest of their parameter."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in one)


def test_two_processes_of_ddp_learn_as_one_does(ranks: list[Found]) -> None:
    for found in (rank["ddp"] for rank in ranks):
        wanted = found["one process"]
        assert furthest(found["applied, then wrapped"], wanted) < 1e-4
        assert furthest(found["wrapped, then applied"], wanted) < 1e-4
        assert furthest(found["without DDP"], wanted) > 0.1, "half of the batch has other gradients"


def test_two_processes_of_fsdp_share_a_model_as_one_unit(ranks: list[Found]) -> None:
    for found in (rank["fsdp"] for rank in ranks):
        wanted = found["logits, one process"]
        for order in ("applied, then sharded", "sharded, then applied"):
            torch.testing.assert_close(found[f"logits, {order}"], wanted, rtol=0, atol=1e-5)
        assert (found["logits, not reduced"] - wanted).abs().max() > 0.1
        assert furthest(found["gradients, sharded"], found["gradients, one process"]) < 1e-4
        assert found["shards"]


def test_two_processes_of_fsdp_cannot_share_block_by_block(ranks: list[Found]) -> None:
    for found in (rank["fsdp"] for rank in ranks):
        assert re.search(BY_ITSELF.format(r"'blocks\.0'"), found["refused"])
        torch.testing.assert_close(found["logits, refused"], found["logits, not reduced"], rtol=0, atol=1e-5)
        assert "mixed torch.Tensor and DTensor" in found["stopped"]


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_blocks_that_are_sharded_by_themselves_are_refused() -> None:
    pytest.importorskip("torchvision")
    model = next(one for one in FAMILIES if one.library == "torchvision").fresh()
    part = "encoder.layers.encoder_layer_2"
    fully_shard(model.get_submodule(part), mesh=init_device_mesh("cpu", (1,)))
    types = [type(module) for module in model.modules()]
    with pytest.raises(agglo.UnsupportedModelError, match=BY_ITSELF.format(re.escape(repr(part)))):
        agglo.apply(model, keep_rate=0.5)
    assert [type(module) for module in model.modules()] == types
