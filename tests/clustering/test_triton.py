"""The triton backend: interpreted against the reference, compiled ahead of time, and run where there is a GPU.

Triton reads TRITON_INTERPRET when it is imported, so this file is also a script that does its part in a process of its
own, with the variable set or not set whatever the tests were started with.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

LINKAGES = ("single", "average", "complete")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")


def in_own_process(job: str, interpret: bool) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run([sys.executable, __file__, job], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def real(batch: int, n: int, seed: int = 0) -> Tensor:
    points = torch.randn(batch, n, 4, generator=torch.Generator().manual_seed(seed))
    return torch.cdist(points, points)


def tied(batch: int, n: int, seed: int = 0) -> Tensor:
    """Few different integers; the lower triangle is NaN and must not be read."""
    distances = torch.randint(0, 4, (batch, n, n), generator=torch.Generator().manual_seed(seed)).float()
    return distances.triu(1) + torch.full((n, n), float("nan")).tril()


def chain(n: int) -> Tensor:
    """Gaps that grow along a line, so that every round has one pair only."""
    at = torch.cumsum(1.1 ** torch.arange(n, dtype=torch.float64), 0)
    return (at[:, None] - at[None, :]).abs().float()[None]


# --- in the interpreter, where a step takes milliseconds: few tokens, each case for several reasons -------------------


def cases() -> Iterator[tuple[Tensor, list[Tensor | float]]]:
    """Distances and cuts (k per item, or a threshold)."""
    yield tied(2, 5), [torch.tensor([1, 5]), 1.0]
    yield real(1, 2), [torch.tensor([1])]
    few = torch.arange(12) % 3  # every token four times, at distances that are no round numbers
    yield real(1, 3)[:, few][:, :, few], [torch.tensor([5]), 0.0]
    yield real(1, 9) - 2.0, [torch.tensor([4]), -0.5]
    yield chain(9), [torch.tensor([3])]
    yield torch.zeros(2, 1, 1), [torch.tensor([1, 1]), 0.5]
    yield torch.zeros(0, 5, 5), [torch.ones(0, dtype=torch.int64), 0.5]
    yield real(2, 22)[:, ::2, ::2], [torch.tensor([4, 7])]  # not contiguous


def compare(linkage: str) -> Iterator[str]:
    """What differs from the reference, over all cases of one linkage."""
    from agglo.clustering.linkage import reference
    from agglo.clustering.linkage import triton as backend

    def differences(distances: Tensor, cuts: list[Tensor | float]) -> Iterator[str]:
        before = distances.clone()
        for cut in cuts:
            how = (cut, None) if isinstance(cut, Tensor) else (None, cut)
            if not torch.equal(backend.labels(distances, linkage, *how), reference.labels(distances, linkage, *how)):
                yield f"{tuple(distances.shape)}, cut {cut}"
        if not torch.equal(distances.nan_to_num(-1.0), before.nan_to_num(-1.0)):
            yield f"{tuple(distances.shape)}: the input changed"

    for case in cases():
        yield from differences(*case)

    ordinary = backend.launch_for
    backend.launch_for = lambda n_tokens: backend.Launch(2, 4, 8, ordinary(n_tokens).TOKENS, 4)
    yield from differences(tied(1, 13), [torch.tensor([6])])  # several blocks in every loop
    backend.launch_for = ordinary

    distances = real(1, 7)
    distances[0, 3, :], distances[0, 2, 5:] = float("nan"), -float("inf")
    if int(backend.labels(distances, linkage, torch.tensor([4]), None).max()) != 3:
        yield "not 4 groups where distances are not finite"


@needs_triton
def test_interpreted_as_the_reference() -> None:
    assert in_own_process("compare", interpret=True) == []


# --- compiled ahead of time -----------------------------------------------------------------------------------------


def compiled_resources(n: int, linkage: str, cut: str, arch: int) -> dict[str, object]:
    """What one thread and one program of the kernel take on an architecture; needs no GPU."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from agglo.clustering.linkage.triton import COMPILE_OPTIONS, cluster_kernel, launch_for

    launch = launch_for(n)
    precision = "*fp64" if linkage == "average" else "*fp32"
    constants = {"LINKAGE": linkage, "CUT": cut}
    constants |= {name: size for name, size in launch._asdict().items() if name.isupper()}
    names = ("distances", "work", "ints", "floats", "groups", "labels", "threshold", "n")
    types = ("*fp32", precision, "*i32", precision, "*i64", "*i64", "fp32", "i32")
    signature = {**dict(zip(names, types, strict=True)), **dict.fromkeys(constants, "constexpr")}
    aligned = {(at,): [["tt.divisibility", 16]] for at, type_ in enumerate(signature.values()) if type_[0] == "*"}
    kernel = triton.compile(
        ASTSource(cluster_kernel, signature, constants, aligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": launch.num_warps, **COMPILE_OPTIONS},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    used |= {"shared": kernel.metadata.shared, "read_only_loads": kernel.asm["ptx"].count("ld.global.nc")}
    return {"case": f"sm_{arch} N={n} {linkage} {cut}", "threads": launch.num_warps * 32, **used}


@needs_triton
def test_compiles_without_spills() -> None:
    results = in_own_process("compile", interpret=False)
    assert len(results) == 3
    for used in results:
        registers, threads, shared = (int(str(used[name])) for name in ("reg", "threads", "shared"))
        assert used["stack"] == used["local"] == 0, f"spills: {used}"
        assert 0 < registers * threads <= 65536, f"no program fits a multiprocessor: {used}"
        assert shared <= 16384, used
        # Loads through the read-only path would not see what earlier phases wrote.
        assert used["read_only_loads"] == 0, used


# --- on a GPU -------------------------------------------------------------------------------------------------------


@needs_triton
@needs_cuda
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize(("batch", "n"), [(8, 196), (1, 1024), (1, 4096)])
@pytest.mark.parametrize("make", [real, tied])
def test_on_gpu_as_on_cpu_in_a_cuda_graph(make: Callable[..., Tensor], batch: int, n: int, linkage: str) -> None:
    from agglo.clustering.operators import module

    backend, k = module("triton"), torch.arange(batch) % 3 * (n // 4) + n // 8
    on_gpu, k_on_gpu = make(batch, n).cuda(), k.cuda()
    backend.labels(on_gpu, linkage, k_on_gpu, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # an error where the host waits for the device
        labels = backend.labels(on_gpu, linkage, k_on_gpu, None)
    for seed in (1, 2):
        distances = make(batch, n, seed)
        on_gpu.copy_(distances)
        graph.replay()
        assert torch.equal(labels.cpu(), module("cpu").labels(distances.triu(1), linkage, k, None))


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        for linkage in LINKAGES:
            for difference in compare(linkage):
                print(json.dumps({"differs": f"{linkage}: {difference}"}))
    else:
        for case in ((196, "average", "threshold", 80), (4096, "single", "k", 90), (4096, "complete", "k", 80)):
            print(json.dumps(compiled_resources(*case)))
