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

import pytest
import torch
from torch import Tensor

LINKAGES = ("single", "average", "complete")
needs_triton = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, check=False).returncode != 0,
    reason="triton is not installed",
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")


def in_own_process(job: str, *arguments: str, interpret: bool) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, __file__, job, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


# --- distances ------------------------------------------------------------------------------------------------------


def real(batch: int, n: int, seed: int = 0) -> Tensor:
    points = torch.randn(batch, n, 4, generator=torch.Generator().manual_seed(seed))
    return torch.cdist(points, points)


def tied(batch: int, n: int, seed: int = 0) -> Tensor:
    """Few different integers; the lower triangle is noise that must not be read."""
    distances = torch.randint(0, 4, (batch, n, n), generator=torch.Generator().manual_seed(seed)).float()
    return distances.triu(1) + torch.full((n, n), float("nan")).tril()


def duplicated(batch: int, n: int, seed: int = 0) -> Tensor:
    """Every token several times, at distances that are no round numbers."""
    few = real(batch, max(n // 4, 1), seed)
    same = torch.arange(n) % few.shape[1]
    return few[:, same][:, :, same]


def chain(n: int) -> Tensor:
    """Gaps that grow along a line, so that every round has one pair only."""
    at = torch.cumsum(1.1 ** torch.arange(n, dtype=torch.float64), 0)
    return (at[:, None] - at[None, :]).abs().float()[None]


def light_and_heavy(batch: int, n: int, seed: int = 0) -> Tensor:
    return 100 ** (2 * torch.rand(batch, n, generator=torch.Generator().manual_seed(seed)) - 1)


def few_weights(batch: int, n: int, seed: int = 0) -> Tensor:
    """Zeros and small numbers, whose products with integers are exact: ties stay ties."""
    return torch.randint(0, 3, (batch, n), generator=torch.Generator().manual_seed(seed)) / 2


# --- in the interpreter ---------------------------------------------------------------------------------------------


def compare(linkage: str) -> Iterator[str]:
    """What differs from the reference, over all cases of one linkage."""
    from agglo.clustering import reference, triton_rounds

    def check(
        name: str, distances: Tensor, *cuts: Tensor | float | None, weights: Tensor | None = None
    ) -> Iterator[str]:
        before = distances.clone()
        for cut in cuts:
            if cut is None:
                found = triton_rounds.tree(distances, linkage, weights)
                same = torch.equal(found, reference.tree(distances, linkage, weights))
            else:
                k, threshold = (cut, None) if isinstance(cut, Tensor) else (None, cut)
                found = triton_rounds.labels(distances, linkage, k, threshold, weights)
                same = found.dtype == torch.int64
                same = same and torch.equal(found, reference.labels(distances, linkage, k, threshold, weights))
            if not same:
                yield f"{name}, {tuple(distances.shape)}, cut {cut}"
        if not torch.equal(distances.nan_to_num(-1.0), before.nan_to_num(-1.0)):
            yield f"{name}, {tuple(distances.shape)}: the input changed"

    def groups(*k: int) -> Tensor:
        return torch.tensor(k)

    for n in (2, 3, 5):
        yield from check("tied", tied(2, n), groups(1, n), groups((n + 1) // 2, 2), None, 1.0)
    yield from check("real", real(1, 17), groups(8), None, 1.5)
    yield from check("tied", tied(1, 17), groups(1), groups(17), None, 1.0)
    yield from check("real", real(3, 33), groups(8, 16, 31))
    yield from check("tied", tied(3, 33), groups(8, 16, 31), None)
    yield from check("tied", tied(1, 64, seed=1), groups(20))
    yield from check("tied", 5 * tied(1, 70, seed=2) + tied(1, 70, seed=3), groups(25))
    yield from check("real", real(1, 100), groups(49), 2.0)
    yield from check("real", real(1, 196), groups(98))
    yield from check("duplicated", duplicated(2, 30), groups(5, 12), None, 0.0)
    yield from check("all equal", torch.ones(1, 12, 12), groups(7), 1.0, 0.5)
    yield from check("all equal", torch.full((1, 13, 13), 0.1), groups(7), 0.1)
    yield from check("negative", real(1, 12) - 2.0, groups(6), None, -0.5)
    yield from check("chain", chain(14), groups(5))
    yield from check("chain backwards", chain(14).flip(1, 2), None)
    yield from check("one token", torch.zeros(2, 1, 1), groups(1, 1), None, 0.5)
    yield from check("no item", torch.zeros(0, 5, 5), torch.ones(0, dtype=torch.int64), None, 0.5)

    for n in (2, 5, 17, 33):
        yield from check("weighted", real(2, n), groups(1, n), groups((n + 1) // 2, 2), weights=light_and_heavy(2, n))
    yield from check("weighted", real(1, 17), None, 1.5, weights=light_and_heavy(1, 17))
    yield from check("weighted and tied", tied(2, 19), groups(6, 11), None, 1.0, weights=few_weights(2, 19))
    yield from check("weighted and negative", real(1, 12) - 2.0, groups(6), None, weights=few_weights(1, 12))
    yield from check("no weight at all", real(1, 13), groups(7), None, 0.0, weights=torch.zeros(1, 13))
    strided = light_and_heavy(2, 22)[:, ::2]
    yield from check("strided weights", real(2, 11), groups(4, 5), weights=strided)

    ordinary = triton_rounds.launch_for
    triton_rounds.launch_for = lambda n_tokens: triton_rounds.Launch(2, 4, 8, ordinary(n_tokens).tokens, 4)
    yield from check("many blocks", tied(1, 19), groups(6), None)
    triton_rounds.launch_for = ordinary

    for value in (float("nan"), float("inf"), -float("inf")):
        distances = real(1, 12)
        distances[0, 3, :] = distances[0, 5, 9:] = value
        if int(triton_rounds.labels(distances, linkage, groups(6), None).max()) != 5:
            yield f"not 6 groups where distances are {value}"
        weights = torch.ones(1, 12)
        weights[0, 3] = value
        if int(triton_rounds.labels(real(1, 12), linkage, groups(6), None, weights).max()) != 5:
            yield f"not 6 groups where a weight is {value}"


@needs_triton
@pytest.mark.parametrize("linkage", LINKAGES)
def test_interpreted_as_the_reference(linkage: str) -> None:
    assert in_own_process("compare", linkage, interpret=True) == []


# --- compiled ahead of time -----------------------------------------------------------------------------------------


def compiled_resources(n: int, linkage: str, cut: str, weighted: bool, arch: int) -> dict[str, object]:
    """What one thread and one program of the kernel take on an architecture; needs no GPU."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from agglo.clustering.triton_kernels import cluster_kernel
    from agglo.clustering.triton_rounds import COMPILE_OPTIONS, launch_for

    launch = launch_for(n)
    precision = "*fp64" if linkage == "average" else "*fp32"
    constants = {
        "WEIGHTED": weighted,
        "LINKAGE": linkage,
        "CUT": cut,
        "ROWS": launch.rows,
        "COLUMNS": launch.columns,
        "LANES": launch.lanes,
        "TOKENS": launch.tokens,
    }
    signature = {
        "distances": "*fp32",
        "weights": "*fp32",
        "work": precision,
        "ints": "*i32",
        "floats": precision,
        "groups": "*i64",
        "result": "*fp64" if cut == "tree" else "*i64",
        "threshold": "fp32",
        "n": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
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
    return {
        "case": f"sm_{arch} N={n} {linkage} {cut}{' weighted' if weighted else ''}",
        "threads": launch.num_warps * 32,
        "shared": kernel.metadata.shared,
        "read_only_loads": kernel.asm["ptx"].count("ld.global.nc"),
        **used,
    }


@needs_triton
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_without_spills(arch: int) -> None:
    results = in_own_process("compile", str(arch), interpret=False)
    assert len(results) == 10
    for used in results:
        registers, threads, shared = (int(str(used[name])) for name in ("reg", "threads", "shared"))
        assert used["stack"] == used["local"] == 0, f"spills: {used}"
        assert 0 < registers * threads <= 65536, f"no program fits a multiprocessor: {used}"
        assert shared <= 16384, used
        # Loads through the read-only path would not see what earlier phases wrote.
        assert used["read_only_loads"] == 0, used


# --- on a GPU -------------------------------------------------------------------------------------------------------


def without_waiting(run: Callable[[], Tensor]) -> Tensor:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_triton
@needs_cuda
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize(("batch", "n"), [(8, 196), (1, 1024), (1, 4096)])
@pytest.mark.parametrize("make", [real, tied])
def test_on_gpu_as_on_cpu(make: Callable[[int, int], Tensor], batch: int, n: int, linkage: str) -> None:
    from agglo.clustering.dispatch import module

    triton_rounds, cpu, reference = module("triton"), module("cpu"), module("reference")
    distances = make(batch, n)
    k = torch.arange(batch) % 3 * (n // 4) + n // 8
    on_gpu, k_on_gpu = distances.cuda(), k.cuda()
    triton_rounds.labels(on_gpu, linkage, k_on_gpu, None)
    labels = without_waiting(lambda: triton_rounds.labels(on_gpu, linkage, k_on_gpu, None))
    assert torch.equal(labels.cpu(), cpu.labels(distances.triu(1), linkage, k, None))
    if n <= 1024:
        assert torch.equal(labels.cpu(), reference.labels(distances, linkage, k, None))
    if make is real:
        heights = triton_rounds.tree(on_gpu, linkage)[..., 2].cpu()
        torch.testing.assert_close(heights, cpu.tree(distances, linkage)[..., 2].double(), rtol=1e-12, atol=1e-12)


@needs_triton
@needs_cuda
@pytest.mark.parametrize("linkage", LINKAGES)
def test_captured_in_a_cuda_graph(linkage: str) -> None:
    from agglo.clustering import triton_rounds

    distances, k = real(8, 196).cuda(), torch.full((8,), 98, device="cuda")
    triton_rounds.labels(distances, linkage, k, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        labels = triton_rounds.labels(distances, linkage, k, None)
    for seed in (1, 2):
        distances.copy_(real(8, 196, seed))
        k.fill_(50 * seed)
        graph.replay()
        assert torch.equal(labels, triton_rounds.labels(distances, linkage, k, None))


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        for difference in compare(sys.argv[2]):
            print(json.dumps({"differs": difference}))
    else:
        cases = [(n, linkage, "k", False) for n in (196, 4096) for linkage in LINKAGES]
        cases += [(196, "average", "threshold", False), (4096, "average", "tree", False)]
        cases += [(4096, "single", "k", True), (4096, "average", "k", True)]
        for case in cases:
            print(json.dumps(compiled_resources(*case, int(sys.argv[2]))))
