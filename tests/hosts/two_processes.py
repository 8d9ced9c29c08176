"""What each of two processes runs: a reduced model under DDP and under FSDP.

    torchrun --nproc_per_node 2 -m tests.hosts.two_processes FOLDER

What a process found is in FOLDER/<rank>.pt afterwards; test_sharded.py judges it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import agglo
from tests.support.tiny_models import stirred

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
        "gradients, one process": gradients(reduced(), IMAGES),
        "gradients, sharded": gradients(sharded, mine),
        "logits, not reduced": logits(dense(), mine),
        "logits, one process": logits(reduced(), mine),
        "logits, applied, then sharded": logits(sharded, mine),
        "logits, sharded, then applied": logits(later, mine),
        "shards": all(isinstance(p, DTensor) for model in (sharded, later) for p in model.parameters()),
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


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mine = IMAGES.chunk(torch.distributed.get_world_size())[rank]
    torch.save({"ddp": ddp(mine), "fsdp": fsdp(mine)}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
