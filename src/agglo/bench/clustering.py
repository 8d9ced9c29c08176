"""The clustering against what others would use for it, timed side by side in one run.

From a float32 distance tensor on the CPU to labels. Every contestant gets the same distances; the times of a case are
taken in turns, and the median counts. Speed is given as a ratio to agglo, because only that survives a change of
machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.classification.data.transforms import evaluation_transform, inputs_for
from agglo.clustering import cluster
from agglo.clustering.arguments import LINKAGES
from agglo.clustering.distances import pairwise
from agglo.experiments.devices import torch_threads
from agglo.experiments.files import require_output, write_json
from agglo.experiments.machine import machine
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table

Labels = np.ndarray
Contestant = Callable[[Tensor, int, str], Labels]


def spatial_tokens(batch: int, n: int, dim: int = 64, seed: int = 0) -> Tensor:
    """Tokens (B, N, D) that resemble their neighbours on a square grid, as those of an image do.

    A field of normal noise at a quarter of the resolution, smoothed by bicubic interpolation, plus 0.3 of fresh noise.
    """
    generator = torch.Generator().manual_seed(seed)
    side = round(n**0.5)
    if side * side != n:
        raise ValueError(f"n={n} must be a square number: tokens lie on a square grid")
    coarse = torch.randn(batch, dim, max(side // 4, 2), max(side // 4, 2), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")
    noise = torch.randn(smooth.shape, generator=generator)
    return (smooth + 0.3 * noise).flatten(2).transpose(1, 2).contiguous()


def deit_keys(checkpoint: Path, images: Path, batch: int, n: int) -> Tensor:
    """Head-averaged keys (B, N, D) of real images in the fourth block of DeiT-Tiny, where the paper reduces first."""
    from PIL import Image

    side = round(n**0.5)
    model: Any = build(ModelSpec("deit_tiny_patch16_224", checkpoint, image_size=(side * 16, side * 16)))
    files = sorted(images.rglob("*.jpg"))
    if len(files) < batch:
        raise ValueError(f"images={str(images)!r} holds {len(files)} .jpg files, fewer than the batch of {batch}")
    transform = evaluation_transform(inputs_for(model))
    pixels = torch.stack([transform(Image.open(file).convert("RGB")) for file in files[:: len(files) // batch][:batch]])
    kept: list[Tensor] = []
    attention = model.blocks[3].attn
    hook = attention.qkv.register_forward_hook(lambda _module, _inputs, out: kept.append(out))
    with torch.no_grad():
        model.forward_intermediates(pixels, indices=[3], stop_early=True, intermediates_only=True)
    hook.remove()
    return kept[0].unflatten(-1, (3, attention.num_heads, attention.head_dim))[:, 1:, 1].mean(dim=2)


# --- contestants ------------------------------------------------------------------------------------------------------


def by_agglo(distances: Tensor, k: int, linkage: str) -> Labels:
    return cluster(distances=distances, k=k, linkage=linkage).numpy()


def by_scikit_learn(distances: Tensor, k: int, linkage: str) -> Labels:
    """What the released code of the ATC paper does: one estimator, fitted to image after image."""
    from sklearn.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage=linkage)
    return np.stack([model.fit(matrix).labels_ for matrix in distances.numpy()])


def _linkage_and_cut(grow: Callable[..., np.ndarray], distances: Tensor, k: int, linkage: str) -> Labels:
    from scipy.cluster.hierarchy import fcluster
    from scipy.spatial.distance import squareform

    trees = (grow(squareform(matrix, checks=False), linkage) for matrix in distances.numpy())
    return np.stack([fcluster(tree, k, "maxclust") for tree in trees])


def by_scipy(distances: Tensor, k: int, linkage: str) -> Labels:
    from scipy.cluster import hierarchy

    return _linkage_and_cut(hierarchy.linkage, distances, k, linkage)


def by_fastcluster(distances: Tensor, k: int, linkage: str) -> Labels:
    import fastcluster

    return _linkage_and_cut(fastcluster.linkage, distances, k, linkage)


CONTESTANTS: dict[str, Contestant] = {
    "agglo": by_agglo,
    "scikit-learn": by_scikit_learn,
    "scipy": by_scipy,
    "fastcluster": by_fastcluster,
}

# (batch, tokens) -> (peer, linkages, times as fast agglo must at least be)
GOALS: dict[tuple[int, int], list[tuple[str, tuple[str, ...], float]]] = {
    (64, 196): [("scikit-learn", LINKAGES, 20.0), ("scipy", LINKAGES, 10.0), ("fastcluster", LINKAGES, 4.0)],
    (1, 4096): [("scipy", ("average", "complete"), 6.0), ("scipy", ("single",), 3.0)],
}


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One linkage on one set of tokens: seconds per call of every contestant, and whether partitions agree."""

    tokens: str
    batch: int
    n: int
    keep_rate: float
    linkage: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    one_pass: list[float] = field(default_factory=list)
    same_partition: dict[str, float] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        return self.median(name) / self.median("agglo")


def _time(call: Callable[..., object], *arguments: object) -> float:
    """Seconds of a call that follows another one: as in a model, caches are warm and threads awake."""
    call(*arguments)
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def _same_partition(one: Labels, two: Labels) -> bool:
    pairs = len(np.unique(np.stack([one, two]), axis=1).T)
    return pairs == len(np.unique(one)) == len(np.unique(two))


def measure(tokens: str, distances: Tensor, keep_rate: float, linkage: str, repeats: int) -> Case:
    batch, n, _ = distances.shape
    k = max(1, int(n * keep_rate))
    case = Case(tokens, batch, n, keep_rate, linkage, {name: [] for name in CONTESTANTS})
    labels = {name: contestant(distances, k, linkage) for name, contestant in CONTESTANTS.items()}  # also warms up
    for name in CONTESTANTS:
        same = [_same_partition(ours, theirs) for ours, theirs in zip(labels["agglo"], labels[name], strict=True)]
        case.same_partition[name] = sum(same) / len(same)
    for _ in range(repeats):
        for name, contestant in CONTESTANTS.items():
            case.seconds[name].append(_time(contestant, distances, k, linkage))
        case.one_pass.append(_time(distances.amin, -1))
    return case


_PEAK_MEMORY = """
import torch, agglo
from agglo.clustering.distances import pairwise
from agglo.bench.clustering import spatial_tokens
torch.set_num_threads({threads})

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

distances = pairwise(spatial_tokens(1, {n}), "cosine")
agglo.cluster(distances=distances[:, :1100, :1100].contiguous(), k=550, linkage="{linkage}")
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
agglo.cluster(distances=distances, k={n} // 2, linkage="{linkage}")
print((status("VmHWM") - before) * 1024 / (distances.numel() * 4))
"""


def peak_memory(n: int, linkage: str) -> float | None:
    """Memory a call takes beside its input at its peak, as a multiple of the distance matrix; None off Linux."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    code = _PEAK_MEMORY.format(n=n, linkage=linkage, threads=torch.get_num_threads())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


# --- report -----------------------------------------------------------------------------------------------------------


def table(cases: list[Case]) -> str:
    peers = [name for name in CONTESTANTS if name != "agglo"]
    columns = [Column(title, left=True) for title in ("tokens", "B x N", "linkage")]
    columns += [Column("agglo, ms per image", ".3f"), *map(Column, (*peers, "one pass", "same partition"))]
    rows = []
    for case in cases:
        own = case.median("agglo")
        rows.append(
            [
                case.tokens,
                f"{case.batch} x {case.n}",
                case.linkage,
                own / case.batch * 1e3,
                *(f"{case.ratio(name):.1f}x" for name in peers),
                f"{statistics.median(case.one_pass) / own:.3f}x",
                ", ".join(f"{case.same_partition[name]:.0%}" for name in peers),
            ]
        )
    return Table(columns, rows).markdown()


def goals(cases: list[Case]) -> list[str]:
    """Every goal with what was measured, in words."""
    lines = []
    for case in cases:
        for peer, linkages, least in GOALS.get((case.batch, case.n), []):
            if case.linkage in linkages and case.keep_rate == 0.5:
                met = "met" if case.ratio(peer) >= least else "MISSED"
                where = f"{case.tokens}, {case.batch} x {case.n}, {case.linkage}"
                lines.append(f"{met}: {case.ratio(peer):.1f}x {peer} on {where} (at least {least:g}x)")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=["64x196", "1x4096"], metavar="BxN", help="batch x tokens")
    parser.add_argument("--linkage", nargs="+", default=list(LINKAGES), choices=LINKAGES)
    parser.add_argument("--keep-rate", nargs="+", type=float, default=[0.5])
    parser.add_argument("--repeats", type=int, default=7, help="times every contestant is timed (default 7)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2); the peers use one each")
    parser.add_argument("--checkpoint", type=Path, help="DeiT-Tiny weights: also time the keys of real images ...")
    parser.add_argument("--images", type=Path, help="... of this folder")
    parser.add_argument("--contended", action="store_true", help="time threads beside busy processes instead of peers")
    parser.add_argument("--json", type=Path, metavar="F", help="every timing, and the machine")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        require_output(arguments.json)
    if arguments.contended:
        from agglo.bench.contention import run_contended

        return run_contended(arguments)
    with torch_threads(arguments.threads):
        sizes = [parse_size(size) for size in arguments.sizes]
        cases: list[Case] = []
        real = arguments.checkpoint is not None and arguments.images is not None
        total = len(sizes) * (1 + real) * len(arguments.keep_rate) * len(arguments.linkage)
        with progress(total, "timed") as advance:
            for batch, n in sizes:
                sets = {"spatial": pairwise(spatial_tokens(batch, n), "cosine")}
                if real:
                    keys = deit_keys(arguments.checkpoint, arguments.images, batch, n)
                    sets["DeiT keys"] = pairwise(keys, "cosine")
                for name, distances in sets.items():
                    for keep_rate in arguments.keep_rate:
                        for linkage in arguments.linkage:
                            cases.append(measure(name, distances, keep_rate, linkage, arguments.repeats))
                            advance(f"{name}, {batch} x {n}, {linkage}, keep {keep_rate:g}")
        largest = max(n for _, n in sizes)
        memory = {linkage: peak_memory(largest, linkage) for linkage in arguments.linkage}
        report = {"machine": machine(), "cases": [asdict(case) for case in cases], "peak_memory": memory}

    print(table(cases))
    print("\nPeer columns: how many times as long the peer takes. One pass: D.amin(-1), as a share of agglo's time.")
    for linkage, share in memory.items():
        if share is not None:
            print(f"peak memory beside the input, N={largest}, {linkage}: {share:.2f} of the distance matrix")
    print("\n".join(goals(cases)))
    if arguments.json:
        write_json(arguments.json, report)
    return 0


def parse_size(text: str) -> tuple[int, int]:
    batch, _, n = text.partition("x")
    if not (batch.isdigit() and n.isdigit()):
        raise ValueError(f"size {text!r} must be BxN, such as 64x196")
    return int(batch), int(n)
