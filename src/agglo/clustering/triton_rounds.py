"""The backend for CUDA: one fused kernel launch from distances to labels, or to the tree.

The host never waits for the device and every shape is known beforehand, so a call can be captured in a CUDA graph
(after one ordinary call, which compiles). Scratch memory besides the input: 8 bytes per distance for average linkage,
4 for complete, none for single, and some 50 bytes per token.

Rounding and ties are those of `reference`: average linkage sums in float64, single and complete linkage compare the
given float32 values and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agglo.clustering.triton_kernels import FLOAT_ROWS, INT_ROWS, MAX_TOKENS, cluster_kernel

# No pipelining, as phases read what earlier ones wrote and loads must stay where they are. With at most 128 registers
# per thread nothing spills, and four programs of four warps share a multiprocessor.
COMPILE_OPTIONS = {"num_stages": 1, "maxnreg": 128, "enable_fp_fusion": False}


class Launch(NamedTuple):
    """Block sizes of the kernel, powers of two: tiles of rows x columns, vectors of lanes, all N tokens at once."""

    rows: int
    columns: int
    lanes: int
    tokens: int
    num_warps: int


def launch_for(n_tokens: int) -> Launch:
    """Block sizes for N tokens: four values of a tile and two of a vector per thread, more threads for more tokens.

    Never fewer lanes than threads: two threads holding the same value could read it before and after it changes.
    """
    tokens = max(16, 1 << (n_tokens - 1).bit_length())
    num_warps = min(max(tokens // 64, 4), 16)
    columns = min(tokens, 64)
    return Launch(num_warps * 128 // columns, columns, lanes=num_warps * 64, tokens=tokens, num_warps=num_warps)


def _run(
    distances: Tensor,
    weights: Tensor | None,
    linkage: str,
    cut: str,
    result: Tensor,
    k: Tensor | None = None,
    threshold: float = 0.0,
) -> Tensor:
    """Fill `result` from distances (B, N, N), and weights (B, N) if any, as `cluster_kernel` says."""
    batch, n_tokens, _ = distances.shape
    if n_tokens > MAX_TOKENS:
        raise ValueError(f"the triton backend takes up to {MAX_TOKENS} tokens, got {n_tokens}; 'torch' takes more")
    distances = distances.contiguous()
    precision = torch.float64 if linkage == "average" else torch.float32
    work = distances.new_empty((0,) if linkage == "single" else distances.shape, dtype=precision)
    ints = distances.new_empty((batch, INT_ROWS.value, n_tokens), dtype=torch.int32)
    floats = distances.new_empty((batch, FLOAT_ROWS.value, n_tokens), dtype=precision)
    launch = launch_for(n_tokens)
    with torch.cuda.device_of(distances):
        cluster_kernel[(batch,)](
            distances,
            distances if weights is None else weights.contiguous(),
            work,
            ints,
            floats,
            ints if k is None else k.contiguous(),
            result,
            threshold,
            n_tokens,
            WEIGHTED=weights is not None,
            LINKAGE=linkage,
            CUT=cut,
            ROWS=launch.rows,
            COLUMNS=launch.columns,
            LANES=launch.lanes,
            TOKENS=launch.tokens,
            num_warps=launch.num_warps,
            **COMPILE_OPTIONS,
        )
    return result


def labels(
    distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None, weights: Tensor | None = None
) -> Tensor:
    """Labels (B, N) of distances (B, N, N), for k groups per item (B,) or all merges within a threshold."""
    batch, n_tokens, _ = distances.shape
    result = distances.new_zeros((batch, n_tokens), dtype=torch.int64)
    if batch == 0 or n_tokens < 2:
        return result
    if threshold is None:
        return _run(distances, weights, linkage, "k", result, k=k)
    in_float32 = torch.tensor(threshold, dtype=torch.float32, device="cpu").item()  # a host tensor: nobody waits
    return _run(distances, weights, linkage, "threshold", result, threshold=in_float32)


def tree(distances: Tensor, linkage: str, weights: Tensor | None = None) -> Tensor:
    """Linkage matrices (B, N-1, 4) of distances (B, N, N), float64, in SciPy's layout."""
    batch, n_tokens, _ = distances.shape
    result = distances.new_empty((batch, n_tokens - 1, 4), dtype=torch.float64)
    if batch == 0 or n_tokens < 2:
        return result
    return _run(distances, weights, linkage, "tree", result)
