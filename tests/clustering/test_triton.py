"""The triton backend: interpreted against the reference, compiled ahead of time, and run where there is a GPU.

Triton reads TRITON_INTERPRET when it is imported, so this file is also a script that does its part in a process of its
own, with the variable set or not set whatever the tests were started with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

LINKAGES = ("single", "average", "complete")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")


def in_own_process(job: str, interpret: bool) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
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


@contextmanager
def several_blocks() -> Iterator[None]:
    """Blocks so small that every loop of the kernels takes several."""
    from agglo.clustering.linkage import triton as backend

    with patch.object(backend, "launch_for", lambda *_: backend.Launch(2, 4, 8, 16, 4)):
        yield


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

    with several_blocks():
        yield from differences(tied(1, 13), [torch.tensor([6])])
        with patch.object(backend, "SPREAD_FROM", 2), patch.object(backend, "_multiprocessors", lambda device: 9):
            yield from differences(tied(2, 13), [torch.tensor([6, 3]), 1.0])

    distances = real(1, 7)
    distances[0, 3, :], distances[0, 2, 5:] = float("nan"), -float("inf")
    if int(backend.labels(distances, linkage, torch.tensor([4]), None).max()) != 3:
        yield "not 4 groups where distances are not finite"


@needs_triton
def test_interpreted_as_the_reference() -> None:
    assert in_own_process("compare", interpret=True) == []


def glue() -> Iterator[str]:
    """What differs between the kernels around the clustering and the tensor operations that they replace."""
    from agglo.clustering import merge
    from agglo.clustering.distances import mean_over_heads, pairwise, weighted
    from agglo.clustering.distances import triton as cosine
    from agglo.clustering.merge import triton as merging
    from agglo.grouping import Grouping

    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 37, 3, 3, 20, generator=generator).half()
    keys = qkv.permute(2, 0, 3, 1, 4)[1][:, :, 1:]  # as timm has them
    if not torch.equal(cosine.head_means(keys), mean_over_heads(keys)):
        yield "head means"
    features = torch.randn(2, 36, 70, generator=generator) * torch.tensor([1e-30, 1e30])[:, None, None]
    weights = torch.rand(2, 36, generator=generator)
    features[1, 5] = features[1, 9]
    for own in (None, weights):
        wanted = pairwise(features, "cosine") if own is None else weighted(pairwise(features, "cosine"), own)
        found = cosine.distances(features, own)
        if not (torch.allclose(found, wanted, atol=2e-6) and torch.equal(found, found.mT) and (found >= 0).all()):
            yield f"distances, weights {own is not None}"
    features[0, 3] = 0
    if not cosine.distances(features, None)[0, 3].isnan().any():
        yield "a zero vector has no cosine distance"

    labels = torch.randint(-1, 9, (2, 36), generator=generator)
    labels[0].clamp_(max=6)  # the last two groups of the first image only pad
    sizes = torch.randint(1, 4, (2, 37), generator=generator).float()
    for own, x in ((None, keys[:, 0]), (sizes, torch.randn(2, 36, 20, generator=generator))):
        if own is not None:
            own = own[:, 1:]
        grouping = Grouping.of(labels, 9, weights=own, drops=True)
        found = merging.means(x, grouping.labels, grouping.sizes, own)
        if not torch.equal(found, grouping.merge(x)):
            yield f"means of groups in {x.dtype}"
        if not torch.allclose(merge._by_adding(x, grouping.labels, grouping.sizes, own), found, atol=1e-3):
            yield "means of groups by index_add"
    x = torch.randn(2, 36, 5, generator=generator, dtype=torch.float32).requires_grad_()
    upstream = torch.randn(2, 9, 5, generator=generator)
    gradients = [
        torch.autograd.grad(means, x, upstream)[0]
        for means in (grouping.merge(x), merge.means(x, grouping.labels, grouping.sizes, grouping.weights))
    ]
    if not torch.allclose(*gradients):
        yield "gradient of means"


@needs_triton
def test_glue_is_what_the_tensor_operations_are() -> None:
    assert in_own_process("glue", interpret=True) == []


# --- compiled ahead of time -----------------------------------------------------------------------------------------


@needs_triton
def test_compiles_without_spills_and_with_every_barrier() -> None:
    """A sample; `make gpu-evidence` compiles everything for all targets."""
    results = in_own_process("compile", interpret=False)
    assert len(results) > 5
    assert [found for found in results if found["problems"]] == []


@needs_triton
def test_49_and_196_tokens_share_a_binary() -> None:
    from agglo.clustering.linkage.triton import launch_for

    for linkage in LINKAGES:
        assert launch_for(linkage, 49) == launch_for(linkage, 196)


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
    elif sys.argv[1] == "glue":
        for difference in glue():
            print(json.dumps({"differs": difference}))
    else:
        from tools.gpu import binaries

        kernels = [*binaries.clustering(196, "average", "k"), *binaries.clustering(8192, "single", "threshold")]
        for kernel in (*kernels, *binaries.clustering(4096, "complete", "k", few_items=True), *binaries.glue(64)):
            found = binaries.compiled(kernel, "sm_80")
            print(json.dumps({**found._asdict(), "problems": found.problems}))
