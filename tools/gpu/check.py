"""Everything that a GPU can tell about agglo, for whoever has one: one report, to be sent in.

    make gpu-check                                  run it, about half an hour, and write gpu-check.json
    python -m tools.gpu.check --table FILE          the tables of a report, for docs/gpu.md

Without a GPU it says what it would do. `--tiny` runs at sizes so small that Triton's interpreter can take part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import agglo
from agglo.attention import proportional_attention
from agglo.clustering import merge
from agglo.clustering.distances import _cosine, _head_means
from agglo.clustering.distances import triton as cosine
from agglo.clustering.linkage import cpu
from agglo.clustering.linkage import triton as backend
from agglo.grouping import Grouping
from agglo.utils.machine import machine, version
from agglo.utils.tables import Column, Table
from agglo.utils.timing import seconds_per_pass
from tools.gpu.mutants import with_delays

LINKAGES = ("single", "average", "complete")
Row = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """How much is run, and where."""

    device: str = "cuda"
    seeds: int = 100
    batches: tuple[int, ...] = (1, 64, 320)
    tokens: tuple[int, ...] = (49, 196, 1024, 4096)
    compared: tuple[tuple[int, int], ...] = ((8, 49), (8, 196), (2, 1024))  # batch and tokens
    model: str = "deit_small_patch16_224"
    image: int = 224
    repeats: int = 9
    dtype: str = "float16"


TINY = Scope("cpu", 1, (1,), (9,), ((1, 9),), "test_vit", 160, 1, "float32")


def spatial_distances(batch: int, n: int, seed: int, kind: str, scope: Scope) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "tied":
        return torch.randint(0, 9, (batch, n, n), generator=generator).float().triu(1).to(scope.device)
    points = torch.randn(batch, n, 8, generator=generator)
    return torch.cdist(points, points).to(scope.device)


def digest(labels: Tensor) -> str:
    return hashlib.sha256(labels.cpu().numpy().tobytes()).hexdigest()[:16]


def compare(find: Callable[..., Tensor], scope: Scope, seeds: int) -> list[Row]:
    """Compare the labels of a kernel with those of the CPU, by their hashes."""
    rows = []
    for (batch, n), linkage, kind, cut in product(scope.compared, LINKAGES, ("random", "tied"), ("k", "threshold")):
        row: Row = {"B": batch, "N": n, "linkage": linkage, "data": kind, "cut": cut, "seeds": seeds, "different": []}
        for seed in range(seeds):
            distances = spatial_distances(batch, n, seed, kind, scope)
            k, threshold = (torch.full((batch,), n // 3), None) if cut == "k" else (None, 2.0)
            found = digest(find(distances, linkage, None if k is None else k.to(scope.device), threshold))
            if found != digest(cpu.labels(distances.cpu(), linkage, k, threshold)):
                row["different"].append(seed)
        row["last hash"] = found
        rows.append(row)
    return rows


def milliseconds(run: Callable[[], Any], scope: Scope) -> float | None:
    """Return the median time of a call, after three that compile and warm up; None where memory is too small."""
    device = torch.device(scope.device)
    try:
        seconds_per_pass(run, device, min(3, scope.repeats))
        return round(1e3 * median(seconds_per_pass(run, device, scope.repeats) for _ in range(scope.repeats)), 4)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def labels(scope: Scope) -> list[Row]:
    """Compare the kernel's labels with the CPU's, by hashes, over all seeds."""
    return compare(backend.labels, scope, scope.seeds)


def delays(scope: Scope) -> list[Row]:
    """The same with a random nanosleep before every store: a missing barrier would show."""
    return compare(with_delays().labels, scope, max(1, scope.seeds // 10))


def own_tests(scope: Scope) -> Row:
    """The tests that need a GPU."""
    return _run(
        [sys.executable, "-m", "pytest", "-q", "tests/clustering/test_triton.py", "tests/clustering/test_gpu.py"]
    )


def sanitizer(scope: Scope) -> Row:
    """Run compute-sanitizer, if it is found, over one seed of the comparison."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"skipped": "compute-sanitizer is not on the PATH"}
    own = [sys.executable, "-m", "tools.gpu.check", "--only", "labels", "--seeds", "1", "--output", os.devnull]
    return {tool: _run([program, "--tool", tool, *own]) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")}


def _run(command: list[str]) -> Row:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"returned": done.returncode, "ended": (done.stdout + done.stderr).splitlines()[-3:]}


def repeatable(scope: Scope) -> Row:
    """Merge, and differentiate it, twice: the same bits."""
    generator = torch.Generator().manual_seed(0)
    batch, n = scope.batches[-1], scope.tokens[-1] // 4 + 9
    given = torch.randint(0, n // 9, (batch, n), generator=generator).to(scope.device)
    grouping = Grouping.of(given, n // 9)
    x = torch.randn(batch, n, 64, generator=generator).to(scope.device).requires_grad_()
    means = [merge.means(x, grouping.labels, grouping.sizes, None) for _ in range(2)]
    gradients = [torch.autograd.grad(one.square().sum(), x)[0] for one in means]
    return {"means": torch.equal(*means), "gradients": torch.equal(*gradients)}


def _model(scope: Scope, method: str | None) -> Any:
    model = timm.create_model(scope.model).eval().to(scope.device, getattr(torch, scope.dtype))
    return model if method is None else agglo.apply(model, method, keep_rate=0.5)


def _images(scope: Scope, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, scope.image, scope.image, generator=generator)
    return images.to(scope.device, getattr(torch, scope.dtype))


@torch.inference_mode()
def graph(scope: Scope) -> Row:
    """Capture a whole reduced forward pass in a CUDA graph, and replay it on other images."""
    model, images = _model(scope, "atc"), _images(scope, 8)
    wanted = model(images.flip(0))
    model(images)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        output = model(images)
    images.copy_(images.flip(0))
    captured.replay()
    return {"as without a graph": torch.allclose(output, wanted, atol=1e-2)}


def clustering(scope: Scope) -> list[Row]:
    """Time distances to labels: batch sizes, tokens, and the threads of few items against those of many."""
    rows: list[Row] = []
    for batch, n, linkage, few in product(scope.batches, scope.tokens, LINKAGES, (False, True)):
        try:
            distances = spatial_distances(1, n, 0, "random", scope).expand(batch, -1, -1).contiguous()
            k = torch.full((batch,), n // 2, device=scope.device)
        except torch.OutOfMemoryError:
            continue
        with patch.object(backend, "_multiprocessors", lambda device, many=not few: 0 if many else 2**30):
            ms = milliseconds(partial(backend.labels, distances, linkage, k, None), scope)
        warps = backend.launch_for(linkage, n, few).num_warps
        rows.append({"B": batch, "N": n, "linkage": linkage, "warps": warps, "spread": few, "ms": ms})
    return rows


def glue(scope: Scope) -> list[Row]:
    """Time what surrounds the clustering, beside the tensor operations that it replaces."""
    rows = []
    dtype = getattr(torch, scope.dtype)
    for batch, n in product(scope.batches, [n for n in scope.tokens if n <= 1024]):
        keys = torch.randn(batch, 6, n, 64, device=scope.device, dtype=dtype)
        features, tokens = _head_means(keys), keys.transpose(1, 2).flatten(2)
        given = torch.arange(n, device=scope.device).expand(batch, -1) // 2
        grouping = Grouping.of(given, (n + 1) // 2)
        merged = (tokens, grouping.labels, grouping.sizes, None)
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "mean over heads": (partial(cosine.head_means, keys), partial(_head_means, keys)),
            "distances": (partial(cosine.distances, features, None), partial(_cosine, features)),
            "merge": (partial(merge.means, *merged), partial(merge._by_adding, *merged)),
        }
        for name, (kernel, instead) in pairs.items():
            times = {"ms": milliseconds(kernel, scope), "torch ms": milliseconds(instead, scope)}
            rows.append({"B": batch, "N": n, "part": name, **times})
    return rows


def _in_a_channel(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor) -> Tensor:
    """Return proportional attention without a mask: log(size) / scale in one more channel, as flash kernels take it."""
    width, scale = q.shape[-1], q.shape[-1] ** -0.5
    more = 8 - width % 8
    one_more = F.pad(q.new_ones(1), (0, more - 1)).expand(*q.shape[:3], -1)
    carried = F.pad((sizes.log() / scale).clamp(min=-3e4).to(k.dtype)[:, None, :, None], (0, more - 1))
    q, k = torch.cat([q, one_more], dim=-1), torch.cat([k, carried.expand(-1, k.shape[1], -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(q, k, F.pad(v, (0, more)), scale=scale)[..., :width]


def attention(scope: Scope) -> list[Row]:
    """Time log(size) as a mask against one more channel, and against attention without either."""
    rows: list[Row] = []
    for batch, n in product(scope.batches, scope.tokens):
        q, k, v = torch.randn(3, batch, 6, n, 64, device=scope.device, dtype=getattr(torch, scope.dtype)).unbind(0)
        sizes = torch.full((batch, n), 2.0, device=scope.device)
        mask, channel = proportional_attention(q, k, v, sizes), _in_a_channel(q, k, v, sizes)
        row: Row = {"B": batch, "N": n, "largest difference": float((mask - channel).abs().max())}
        row["mask ms"] = milliseconds(partial(proportional_attention, q, k, v, sizes), scope)
        row["channel ms"] = milliseconds(partial(_in_a_channel, q, k, v, sizes), scope)
        row["neither ms"] = milliseconds(partial(F.scaled_dot_product_attention, q, k, v), scope)
        rows.append(row)
    return rows


def models(scope: Scope) -> list[Row]:
    """Time passes of a model: dense, ToMe and ATC at keep rate 0.5."""
    rows = []
    for batch in scope.batches:
        images = _images(scope, batch)
        times = {}
        for method in (None, "tome", "atc"):
            model = _model(scope, method)
            times[f"{method or 'dense'} ms"] = milliseconds(partial(model, images), scope)
        rows.append({"B": batch, **times})
    return rows


STEPS = (labels, delays, own_tests, sanitizer, repeatable, graph, clustering, glue, attention, models)
NEED_CUDA = (delays, own_tests, sanitizer, graph)  # have no meaning, or cannot run, in the interpreter


def about(scope: Scope) -> Row:
    """Return the machine, the device and the versions."""
    found: Row = machine(torch.device(scope.device)) | {name: version(name) for name in ("triton", "timm")}
    if scope.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"multiprocessors": properties.multi_processor_count, "memory": properties.total_memory}
        found |= {
            "capability": torch.cuda.get_device_capability(0),
            "CUDA": torch.version.cuda,
            "HIP": torch.version.hip,
        }
    return found


def tables(report: Row) -> Iterator[str]:
    """Yield the Markdown tables of a report."""
    yield "\n".join(f"- {name}: {value}" for name, value in report["about"].items())
    for name, found in report["steps"].items():
        rows = found if isinstance(found, list) else [found]
        columns = [Column(str(column)) for column in rows[0]]
        values = [
            [", ".join(map(str, v)) or "none" if isinstance(v, list) else v for v in row.values()] for row in rows
        ]
        yield f"### {name}\n\n{Table(columns, values).markdown()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--only", choices=[step.__name__ for step in STEPS])
    parser.add_argument("--seeds", type=int, default=Scope.seeds)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.table is not None:
        print("\n\n".join(tables(json.loads(options.table.read_text(encoding="utf-8")))))
        return
    scope = TINY if options.tiny else Scope(seeds=options.seeds)
    if not (options.tiny or torch.cuda.is_available()):
        print("No CUDA device: nothing runs. On a GPU this would do:\n")
        for step in STEPS:
            print(f"  {step.__name__:12} {step.__doc__}")
        print(f"\nwith {asdict(scope)}, and write {options.output}")
        return
    report: Row = {"about": about(scope), "scope": asdict(scope), "steps": {}}
    for step in STEPS:
        if options.only in (None, step.__name__) and (scope.device == "cuda" or step not in NEED_CUDA):
            print(f"{step.__name__}: {step.__doc__}", flush=True)
            report["steps"][step.__name__] = step(scope)
            options.output.write_text(json.dumps(report, indent=1), encoding="utf-8")  # kept if a later step fails
    print(f"Written to {options.output}; docs/gpu.md says how to send it in.")


if __name__ == "__main__":
    main()
