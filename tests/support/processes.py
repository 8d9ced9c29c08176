"""Programs that tests start in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

HANGS = 1200  # seconds: whatever takes longer hangs, however busy the machine is


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
