"""Compile every kernel for GPUs that need not be there: what a thread takes, and whether all barriers are there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from agglo.clustering.distances import triton as cosine
from agglo.clustering.linkage import triton as linkage_triton
from agglo.clustering.merge import triton as merge

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)}
TARGETS |= {"gfx942": GPUTarget("hip", "gfx942", 64)}
REGISTERS = {"cuda": 65536, "hip": 131072}  # of a multiprocessor, 32 bits each
_TYPES = {
    **dict.fromkeys(("distances", "weights", "sizes", "means"), "*fp32"),
    **dict.fromkeys(("ints", "members", "starts"), "*i32"),
    **dict.fromkeys(("groups", "labels"), "*i64"),
    **dict.fromkeys(("x", "rows"), "*fp16"),
    "threshold": "fp32",
}  # everything else is int32


class Kernel(NamedTuple):
    """A kernel with the sizes it is compiled for."""

    name: str
    function: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    precision: str = "*fp32"  # of the working matrix


class Binary(NamedTuple):
    """What was compiled for one architecture; registers per thread, spills and shared memory in bytes."""

    kernel: str
    target: str
    threads: int
    registers: int
    spills: int
    shared: int
    barriers: int  # in the binary
    shuffles: int
    barriers_in_source: int  # before the compiler added its own, around reductions
    read_only_loads: int  # which do not see what another phase wrote
    tf32: bool

    @property
    def fits(self) -> bool:
        family = TARGETS[self.target].backend
        return 0 < self.registers * self.threads <= REGISTERS[family] and self.shared <= 49152

    @property
    def problems(self) -> list[str]:
        """Return what is wrong with the binary, best nothing."""
        wrong = [f"{self.spills} bytes of spills"] if self.spills else []
        wrong += [] if self.fits else ["does not fit a multiprocessor"]
        wrong += ["lost a barrier"] if self.barriers < self.barriers_in_source else []
        # The working matrix is never read through this path; what is only read may be.
        wrong += ["reads past phases"] if self.read_only_loads else []
        return wrong + (["multiplies in TF32"] if self.tf32 else [])


def clustering(n: int, linkage: str, cut: str, few_items: bool = False) -> Iterator[Kernel]:
    """Yield the kernels that cluster N tokens."""
    spread = few_items and n >= linkage_triton.SPREAD_FROM
    pieces = list(phases(linkage, cut, linkage_triton.launch_for(linkage, n, few_items), spread))
    for piece in pieces if spread else pieces[:1]:
        yield piece._replace(name=f"{piece.name} {linkage} {cut} N={n}{' few' if few_items else ''}")


def phases(linkage: str, cut: str, launch: linkage_triton.Launch, spread: bool) -> Iterator[Kernel]:
    """Yield the kernel that clusters, and those that do parts of its work where it is spread."""
    precision = "*fp64" if linkage == "average" else "*fp32"
    options = {"num_warps": launch.num_warps, **linkage_triton.COMPILE_OPTIONS}
    sizes = {name: size for name, size in launch._asdict().items() if name.isupper()}
    tiles = {"ROWS": launch.ROWS, "COLUMNS": launch.COLUMNS}
    constants = {"LINKAGE": linkage, "CUT": cut, "SPREAD": spread, **sizes}
    yield Kernel("cluster", linkage_triton.cluster_kernel, constants, options, precision)
    if linkage != "single":
        yield Kernel("search", linkage_triton.search_kernel, {"LINKAGE": linkage, **tiles}, options, precision)
    if cut == "k":
        yield Kernel("rank", linkage_triton.rank_kernel, tiles, options, precision)
        yield Kernel("label", linkage_triton.label_kernel, {"LANES": launch.LANES}, options, precision)


def glue(width: int) -> Iterator[Kernel]:
    """Yield the kernels between a block's keys and the clustering, and between labels and tokens."""
    channels = triton.next_power_of_2(width)
    of_means = {"ROWS": max(1, cosine._MEAN_VALUES // channels), "CHANNELS": channels}
    yield Kernel(f"head mean d={width}", cosine.head_mean_kernel, of_means, cosine.MEAN_OPTIONS)
    for weighted in (False, True):
        tiles = {"WEIGHTED": weighted, "TILE": cosine._TILE, "CHANNELS": cosine._CHANNELS}
        yield Kernel(f"distances d={width} weighted={weighted}", cosine.distance_kernel, tiles, cosine.DISTANCE_OPTIONS)
        rows = {"WEIGHTED": weighted, "CHANNELS": channels}
        yield Kernel(f"means C={width} weighted={weighted}", merge.mean_kernel, rows, merge.OPTIONS)
    yield Kernel("order", merge.order_kernel, {"ROWS": merge._ROWS, "COLUMNS": merge._COLUMNS}, merge.OPTIONS)


def matrix() -> Iterator[Kernel]:
    """Yield every linkage and cut up to the largest N, and the glue up to wide tokens."""
    for linkage in ("single", "average", "complete"):
        for cut in ("k", "threshold"):
            for n in (196, 1024, 4096, linkage_triton.MAX_TOKENS):
                for few_items in (False, True):
                    yield from clustering(n, linkage, cut, few_items)
    for width in (64, 384, 4096):
        yield from glue(width)


def compiled(kernel: Kernel, target: str) -> Binary:
    """Compile a kernel for a target."""
    to = TARGETS[target]
    types = {**_TYPES, "work": kernel.precision, "floats": kernel.precision}
    if kernel.function is cosine.distance_kernel:
        types["rows"] = "*fp32"
    constants = dict.fromkeys(kernel.constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.function.arg_names} | constants
    aligned = {(at,): [["tt.divisibility", 16]] for at, type_ in enumerate(signature.values()) if type_[0] == "*"}
    options = {"num_warps": 4, **kernel.options}
    if to.backend == "hip":  # as many threads as on CUDA
        options["num_warps"] = options["num_warps"] * linkage_triton._WARP // to.warp_size
        options.pop("maxnreg", None)
    made = triton.compile(ASTSource(kernel.function, signature, kernel.constants, aligned), target=to, options=options)
    return Binary(
        kernel=kernel.name,
        target=target,
        threads=options["num_warps"] * to.warp_size,
        shared=made.metadata.shared,
        barriers_in_source=len(re.findall(r"ttg\.barrier|gpu\.barrier", made.asm["ttir"])),
        **(_in_amdgcn(made.asm["amdgcn"]) if to.backend == "hip" else _in_cubin(made.asm["cubin"], made.asm["ptx"])),
    )


def _in_cubin(cubin: bytes, ptx: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "spills": used["STACK"] + used["LOCAL"],
        "barriers": len(re.findall(r"\bbar(?:rier)?\.sync", ptx)),
        "shuffles": ptx.count("shfl.sync") + ptx.count("redux.sync"),
        "read_only_loads": ptx.count("ld.global.nc"),
        "tf32": "tf32" in ptx,
    }


def _in_amdgcn(text: str) -> dict[str, Any]:
    number = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    return {
        "registers": number["vgpr_count"],
        "spills": number["private_segment_fixed_size"],  # scalar registers spill into lanes of vector registers
        "barriers": len(re.findall(r"^\s*s_barrier\b", text, re.MULTILINE)),
        "shuffles": len(re.findall(r"ds_bpermute|_dpp ", text)),
        "read_only_loads": 0,
        "tf32": "xf32" in text,
    }
