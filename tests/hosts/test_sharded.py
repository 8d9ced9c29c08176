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
        for here in found["weights here"]:
            assert 0.4 < here / found["weights"] < 0.6, "about half of them each"
    for here in zip(*(rank["fsdp"]["weights here"] for rank in ranks), strict=True):
        assert sum(here) == ranks[0]["fsdp"]["weights"], "and together all"


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
@pytest.mark.parametrize(
    ("family", "part", "named"),
    [
        ("timm-VisionTransformer", "blocks.2.attn", "blocks.2.attn"),
        ("transformers-ViTForImageClassification", "vit.layers.2", "layers.2"),
        ("torchvision-VisionTransformer", "encoder.layers.encoder_layer_2", "encoder.layers.encoder_layer_2"),
    ],
)
def test_every_host_refuses_blocks_that_are_sharded_by_themselves(family: str, part: str, named: str) -> None:
    model = model_of(family)
    fully_shard(model.get_submodule(part), mesh=init_device_mesh("cpu", (1,)))
    types = [type(module) for module in model.modules()]
    with pytest.raises(agglo.UnsupportedModelError, match=BY_ITSELF.format(re.escape(repr(named)))):
        agglo.apply(model, keep_rate=0.5)
    assert [type(module) for module in model.modules()] == types


def model_of(family: str) -> Any:
    pytest.importorskip(family.partition("-")[0])
    return next(one for one in FAMILIES if one.id == family).fresh()
