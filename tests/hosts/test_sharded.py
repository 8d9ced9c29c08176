"""What docs/deploying.md says of DDP and FSDP, with two processes: a model in one process shards nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import agglo
from tests.support.processes import in_two_processes
from tests.support.tiny_models import stirred

timm = pytest.importorskip("timm")

BY_ITSELF = r"{} of this \w+ is sharded by itself.*agglo\.apply\(model, \.\.\.\), then fully_shard\(model\)"


Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    in_two_processes(folder / "rendezvous", find, folder)
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


IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def dense() -> Any:
    """The same in every process."""
    torch.manual_seed(0)
    return stirred(timm.create_model("test_vit", img_size=64, depth=4, num_classes=10))


def reduced() -> Any:
    return agglo.apply(dense(), keep_rate=0.5)


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Of a loss that is the mean over images: its gradients are the mean of those of the two halves."""
    model.train()(images).pow(2).mean().backward()
    named = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    return {name: _gathered(gradient) for name, gradient in named.items() if gradient is not None}


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    found: Tensor = model.eval()(images)
    return found


def _gathered(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def ddp(mine: Tensor) -> dict[str, Any]:
    return {
        "one process": gradients(reduced(), IMAGES),
        "without DDP": gradients(reduced(), mine),
        "applied, then wrapped": gradients(DistributedDataParallel(reduced()), mine),
        "wrapped, then applied": gradients(agglo.apply(DistributedDataParallel(dense()), keep_rate=0.5), mine),
    }


def fsdp(mine: Tensor) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded = fully_shard(reduced(), mesh=mesh)
    later = agglo.apply(fully_shard(dense(), mesh=mesh), keep_rate=0.5)
    return {
        "shards": all(isinstance(p, DTensor) for model in (sharded, later) for p in model.parameters()),
        "gradients, one process": gradients(reduced(), IMAGES),
        "gradients, sharded": gradients(sharded, mine),
        "logits, not reduced": logits(dense(), mine),
        "logits, one process": logits(reduced(), mine),
        "logits, applied, then sharded": logits(sharded, mine),
        "logits, sharded, then applied": logits(later, mine),
        **_block_by_block(mesh, mine),
    }


def _block_by_block(mesh: DeviceMesh, mine: Tensor) -> dict[str, Any]:
    """What is said of a model that is sharded block by block before and after agglo.apply."""
    before, after, found = dense(), reduced(), dict[str, Any]()
    for model in (before, after):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    try:
        agglo.apply(before, keep_rate=0.5)
    except agglo.UnsupportedModelError as error:
        found["refused"] = str(error)
    found["logits, refused"] = logits(before, mine)
    try:
        logits(after, mine)
    except RuntimeError as error:
        found["stopped"] = str(error)
    return found


def find(folder: Path) -> None:
    """What each of two processes does."""
    rank = torch.distributed.get_rank()
    mine = IMAGES.chunk(torch.distributed.get_world_size())[rank]
    torch.save({"ddp": ddp(mine), "fsdp": fsdp(mine)}, folder / f"{rank}.pt")
