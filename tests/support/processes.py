"""Programs and functions that tests run in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

HANGS = 1200  # seconds: whatever takes longer hangs, however busy the machine is
# Its processes are forked from one that has imported these modules already.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["agglo.lab.cli.detect", "accelerate", "faster_coco_eval", "timm", "torchvision"])


def in_two_processes(rendezvous: Path, call: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in two processes, which meet at a file and talk over gloo, as under `torchrun`."""
    processes = [FORKSERVER.Process(target=_one_of_two, args=(r, rendezvous, call, arguments)) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS)
    assert [process.exitcode for process in processes] == [0, 0]


def _one_of_two(rank: int, rendezvous: Path, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    how: dict[str, Any] = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=HANGS)}
    torch.distributed.init_process_group("gloo", init_method=rendezvous.as_uri(), **how)
    call(*arguments)
    if torch.distributed.is_initialized():  # Accelerate may have ended it
        torch.distributed.destroy_process_group()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on one thread, with the paths of this process, and require that it succeeds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AGGLO_TRACEBACK": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes, which talk over gloo."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *arguments)


def accelerate_launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, started by `accelerate launch`.

    For port 0 Accelerate looks up a free port and uses it seconds later, when it may be taken. Told a port that is in
    use, it lets torchrun bind one.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        how = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
        how += ["--dynamo_backend", "no", "--main_process_port", str(taken.getsockname()[1])]
        return python("-m", "accelerate.commands.accelerate_cli", "launch", *how, *arguments)
