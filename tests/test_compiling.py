"""torch.compile is there when it is needed and not before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import agglo
from tests.support.processes import HANGS

PROGRAM = """
import sys, torch
heavy = {"torch._dynamo", "torch._inductor", "numba", "timm", "transformers", "torchvision", "open_clip", "diffusers",
         "matplotlib", "PIL", "torch.distributed.fsdp"}
before = heavy & sys.modules.keys()
import agglo
print(sum(name.partition(".")[0] == "agglo" for name in sys.modules), *sorted((heavy & sys.modules.keys()) - before))
"""


def test_importing_agglo_imports_little_of_it_no_compiler_and_no_host() -> None:
    package = str(Path(agglo.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment, timeout=HANGS
    )
    modules, *heavy = done.stdout.split()
    assert heavy == []
    assert int(modules) <= 60
