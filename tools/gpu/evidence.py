"""What can be known about the GPU path without a GPU: races, launches, binaries.

make gpu-evidence
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from typing import Any

import torch

from agglo.utils.tables import Column, Table
from tools.gpu import binaries
from tools.gpu.launches import count_pass


def races() -> tuple[Table, list[str]]:
    """Run the race detector, which needs the interpreter and so a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tools.gpu.races"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    rows: list[list[Any]] = []
    problems: list[str] = []
    for found in map(json.loads, printed.splitlines()):
        deleted = "none" if found["deleted"] is None else f"line {found['deleted']}"
        if bool(found["races"]) == (found["deleted"] is None) or (found["deleted"] is None and found["wrong"]):
            problems.append(f"barrier deleted: {deleted}, races: {found['races']}, wrong labels: {found['wrong']}")
        rows.append([deleted, len(found["races"]), next(iter(found["races"]), ""), len(found["wrong"])])
    columns = [Column("barrier deleted"), Column("races"), Column("for example", left=True), Column("wrong labels")]
    return Table(columns, rows), problems


def launches() -> tuple[Table, list[str]]:
    """Count the passes of DeiT-S."""
    rows: list[list[Any]] = []
    problems: list[str] = []
    for method, dtype in (
        (None, torch.float16),
        ("atc", torch.float16),
        ("atc", torch.float32),
        ("tome", torch.float16),
    ):
        counts = count_pass(method, dtype)
        kernels = sum(number for name, number in counts.launches.items() if name.endswith("_kernel"))
        waits = len(counts.copies), len(counts.waits)
        problems += [f"{method or 'dense'} waits: {counts.copies + counts.waits}"] if any(waits) else []
        rows.append([method or "dense", str(dtype).split(".")[1], counts.n_launches, kernels, *waits])
    columns = [Column("DeiT-S, 64 images", left=True), Column("dtype", left=True), Column("launches")]
    return Table([*columns, Column("of agglo"), Column("host copies"), Column("waits")], rows), problems


def compiled() -> tuple[Table, list[str]]:
    """Compile everything for all targets: the worst of each kernel, and all problems."""
    found = [binaries.compiled(kernel, target) for target in binaries.TARGETS for kernel in binaries.matrix()]
    by_kernel = sorted(found, key=lambda binary: (binary.target, binary.kernel.split()[0]))
    rows: list[list[Any]] = []
    for (target, name), same in groupby(by_kernel, key=lambda binary: (binary.target, binary.kernel.split()[0])):
        own = list(same)
        most = [max(getattr(one, field) for one in own) for field in ("registers", "spills", "shared", "barriers")]
        rows.append([target, name, len(own), *most])
    columns = [Column("target", left=True), Column("kernel", left=True), Column("cases"), Column("registers")]
    columns += [Column("spills"), Column("shared memory"), Column("barriers")]
    problems = [f"{one.kernel} for {one.target}: {', '.join(one.problems)}" for one in found if one.problems]
    return Table(columns, rows), problems


def main() -> None:
    problems: list[str] = []
    for title, tables in (("Launches", launches), ("Binaries", compiled), ("Races", races)):
        table, wrong = tables()
        print(f"## {title}\n\n{table.markdown()}\n", flush=True)
        problems += wrong
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
