"""Look for races between the threads of a program, and between programs, in Triton's interpreter.

Two accesses to one address are a race if one of them writes and no barrier of ours lies between them. Not so where a
lane stores at what it has just loaded from, in one function: what is stored, or whether, is computed from what was
loaded. Otherwise nothing is concluded from equal lanes, which need not be the same thread: the compiler lays out loads
and stores differently. Barriers that it adds around reductions are not relied on either. That the detector finds what
it should is shown by deleting each barrier.

    python -m tools.gpu.races [--quick]
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from agglo.clustering.linkage import reference
from tools.gpu.mutants import barrier_lines, without_barrier

LINKAGES = ("single", "average", "complete")
_SCALAR = -1  # the lane of what one thread does for all


class Detector:
    """Notes what programs load and store, from one barrier to the next."""

    def __init__(self) -> None:
        self.races: set[str] = set()
        self.barriers = 0
        self._epoch: list[tuple[str, np.ndarray, np.ndarray, str]] = []  # kind, addresses, lanes, place
        self._launch: list[tuple[bool, int, np.ndarray, str]] = []  # whether it writes, program, addresses, place
        self._program = 0

    def access(self, kind: str, pointers: Any, mask: Any) -> None:
        addresses = np.asarray(pointers.data)
        active = np.broadcast_to(np.asarray(mask.data), addresses.shape).reshape(-1)
        lanes = np.flatnonzero(active)
        # Lanes of tiles and of vectors of another length get numbers of their own.
        numbers = lanes + hash(addresses.shape) % 2**40 * 2**20 if addresses.size > 1 else np.full(len(lanes), _SCALAR)
        place = _place()
        self._epoch.append((kind, addresses.reshape(-1)[lanes], numbers, place))
        self._launch.append((kind != "load", self._program, addresses.reshape(-1)[lanes], place))

    def barrier(self) -> None:
        self.barriers += 1
        self._compare_lanes()

    def next_program(self) -> None:
        self._program += 1
        self._compare_lanes()

    def end_launch(self) -> None:
        """Compare the programs of a launch, which no barrier separates."""
        self._compare_lanes()
        if self._launch:
            owners: dict[int, tuple[int, bool, str]] = {}
            for writes, program, addresses, place in self._launch:
                for address in addresses.tolist():
                    known, written, other = owners.get(address, (program, writes, place))
                    if known != program and (writes or written):
                        self.races.add(f"between programs: {other}, {place}")
                    owners[address] = (program, written or writes, place)
        self._launch, self._program = [], 0

    def _compare_lanes(self) -> None:
        epoch, self._epoch = self._epoch, []
        if all(kind == "load" for kind, *_ in epoch):
            return
        address = np.concatenate([addresses for _, addresses, _, _ in epoch])
        lane = np.concatenate([lanes for _, _, lanes, _ in epoch])
        access = np.repeat(np.arange(len(epoch)), [len(addresses) for _, addresses, _, _ in epoch])
        kinds = np.array([("load", "store", "atomic").index(kind) for kind, *_ in epoch])[access]
        _, number = np.unique(address, return_inverse=True)
        written, counts = np.bincount(number, weights=kinds > 0), np.bincount(number)
        shared = np.flatnonzero(((written > 0) & (counts > 1))[number])  # in the order of time
        shared = shared[np.argsort(number[shared], kind="stable")]
        for group in np.split(shared, np.flatnonzero(np.diff(number[shared])) + 1):
            kind = kinds[group]
            for writing in group[kind > 0]:
                here = epoch[access[writing]][3]
                for other in group[group != writing]:
                    there = epoch[access[other]][3]
                    changes = kinds[other] == 0 and other < writing and lane[other] == lane[writing]
                    both_atomic = kinds[other] == kinds[writing] == 2
                    if not (both_atomic or (changes and here.split(":")[0] == there.split(":")[0])):
                        self.races.add(" and ".join(sorted((here, there))))


def _place() -> str:
    """Return the function and line of the kernel that is being interpreted."""
    frame = sys._getframe(3)
    while frame.f_back is not None and not Path(frame.f_code.co_filename).stem.startswith("triton"):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def watch(detector: Detector) -> None:
    """Let the interpreter tell the detector; for the rest of the process."""
    builder = interpreter.InterpreterBuilder
    load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    start, execute = builder.set_grid_idx, interpreter.GridExecutor.__call__

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        detector.access("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        detector.access("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def watched_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        detector.access("atomic", pointers, mask)
        return rmw(self, operation, pointers, value, mask, *rest)

    def watched_start(self: Any, *index: int) -> Any:
        detector.next_program()
        return start(self, *index)

    def watched_launch(self: Any, *arguments: Any, **options: Any) -> Any:
        result = execute(self, *arguments, **options)
        detector.end_launch()
        return result

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    builder.create_atomic_rmw, builder.create_barrier = watched_rmw, lambda self: detector.barrier()
    builder.set_grid_idx, interpreter.GridExecutor.__call__ = watched_start, watched_launch


def distances(kind: str, batch: int, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "tied":
        return torch.randint(0, 4, (batch, n, n), generator=generator).float().triu(1)
    if kind == "chain":  # one pair in every round
        at = torch.cumsum(1.3 ** torch.arange(n, dtype=torch.float64), 0)
        return (at[:, None] - at[None, :]).abs().float().expand(batch, -1, -1).contiguous()
    points = torch.randn(batch, n, 4, generator=generator)
    found = torch.cdist(points, points)
    if kind == "weighted":
        weights = torch.rand(batch, n, generator=generator)
        found = found * torch.maximum(weights[:, None], weights[:, :, None])
    return found


def differences(module: ModuleType, kinds: tuple[str, ...], batch: int, n: int, seed: int = 0) -> Iterator[str]:
    """Cluster in every way with blocks so small that each loop takes several; yield what is not the reference's."""
    blocks = (2, 4, 8) if n < 16 else (8, 16, 32)
    module.launch_for = lambda *_: module.Launch(*blocks, 1 << (n - 1).bit_length(), 4)
    for kind in kinds:
        data = distances(kind, batch, n, seed)
        for linkage in LINKAGES:
            for cut in ((torch.full((batch,), n // 3), None), (None, float(data.median()))):
                wanted = reference.labels(data, linkage, *cut)
                for few_items in (False, True):
                    module.SPREAD_FROM, module._multiprocessors = 2, lambda device, few=few_items: 9**9 if few else 0
                    if not torch.equal(module.labels(data, linkage, *cut), wanted):
                        yield f"{kind} {linkage} {'k' if cut[1] is None else 'threshold'} few={few_items}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one size, and only some of the barriers deleted")
    quick = parser.parse_args().quick
    detector = Detector()
    watch(detector)
    kinds = ("tied",) if quick else ("random", "tied", "weighted", "chain")
    wrong: list[str] = []
    for n in (9,) if quick else (13, 49, 80):
        wrong += differences(without_barrier(None), kinds, 2, n)
    print(json.dumps({"deleted": None, "races": sorted(detector.races), "wrong": wrong, "epochs": detector.barriers}))
    for number, line in enumerate(barrier_lines()):
        if quick and number % 8:
            continue
        detector.races.clear()
        wrong = list(differences(without_barrier(number), ("tied",), 1, 9 if quick else 13))
        print(json.dumps({"deleted": line, "races": sorted(detector.races), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
