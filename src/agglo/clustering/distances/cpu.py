"""Cosine distances on the CPU: heads averaged, rows scaled to length 1 and multiplied, image by image, in the caches.

A matrix product of the whole batch computes both triangles and leaves the caches before the clustering reads them. Four
rows of one triangle at a time take half of the time of MKL's product at 196 tokens, whatever the number of threads and
images, so that an image has the same distances alone and in a batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.kernels import as_numbers, inner, kernel, run

# Squares within these sum up without overflow, and without losing digits to subnormal numbers.
_LEAST, _MOST = np.float32(1e-25), np.float32(1e25)
_ZERO, _ONE = np.float32(0), np.float32(1)
# Unsigned, as in `linkage/cpu/keys.py`, and never mixed with signed ones, which Numba would turn into floats.
_1, _2, _3, _4, _16 = (np.uint64(number) for number in (1, 2, 3, 4, 16))
_PANEL = np.uint64(1024)  # columns at once
_PRODUCTS_PER_PART = 4_000_000  # for fewer, waking a thread takes longer than the work


class Workspace(NamedTuple):
    """What a thread needs for one image after the other; what pads the units is zero and stays so."""

    units: np.ndarray  # (N, D), both padded to multiples of 4
    columns: np.ndarray  # the same transposed, (D, N), N padded to whole vectors
    sums: np.ndarray  # four rows of dot products


def workspace(n: int, d: int) -> Workspace:
    """Return what a thread needs for images of N tokens with D channels."""
    n, d = -(-n // 4) * 4, -(-d // 4) * 4
    columns = np.zeros((d, -(-n // 16) * 16), np.float32)
    return Workspace(np.zeros((n, d), np.float32), columns, np.empty(4 * int(_PANEL), np.float32))


@partial(inner, fastmath={"reassoc", "contract"})  # sums in any order, which lets them use vector instructions
def square_sum(row):
    total = _ZERO
    for c in range(row.shape[0]):
        total += row[c] * row[c]
    return total


@inner
def write_units(numbers, start, layout, work):
    """Write the mean over heads of an image's features, scaled to length 1; zero, infinite and NaN rows become NaN.

    Returns whether there are such rows.
    """
    n_heads, n, d, _, per_head, per_token = layout
    any_without = False
    for t in range(n):
        row, at = work.units[t, :d], start + t * per_token
        for c in range(d):
            row[c] = numbers[at + c]
        for h in range(_1, n_heads):
            for c in range(d):
                row[c] += numbers[at + h * per_head + c]
        if n_heads > _1:
            for c in range(d):
                row[c] /= np.float32(n_heads)
        squares = square_sum(row)
        if _LEAST < squares < _MOST:
            shrink = np.float32(1 / np.sqrt(np.float64(squares)))
            for c in range(d):
                row[c] *= shrink
        else:
            total = np.float64(0)
            for c in range(d):
                total += np.float64(row[c]) * np.float64(row[c])
            for c in range(d):
                row[c] = np.float32(np.float64(row[c]) / np.sqrt(total))
            any_without |= not (total > 0 and total < np.inf)
    for c in range(d):
        for t in range(n):
            work.columns[c, t] = work.units[t, c]
    return any_without


@partial(inner, fastmath={"contract"})
def add_products(x, columns, start, m, sums):
    """Write the dot products of four rows of x with m columns from `start` on, four channels at a time."""
    stride, flat = np.uint64(columns.shape[1]), columns.reshape(columns.size)
    row_0, row_1, row_2, row_3 = x[_1 - _1], x[_1], x[_2], x[_3]
    for j in range(m):
        sums[j] = _ZERO
        sums[_PANEL + j] = _ZERO
        sums[_2 * _PANEL + j] = _ZERO
        sums[_3 * _PANEL + j] = _ZERO
    for c in range(_1 - _1, np.uint64(columns.shape[0]), _4):
        a_0, b_0, c_0, d_0 = row_0[c], row_0[c + _1], row_0[c + _2], row_0[c + _3]
        a_1, b_1, c_1, d_1 = row_1[c], row_1[c + _1], row_1[c + _2], row_1[c + _3]
        a_2, b_2, c_2, d_2 = row_2[c], row_2[c + _1], row_2[c + _2], row_2[c + _3]
        a_3, b_3, c_3, d_3 = row_3[c], row_3[c + _1], row_3[c + _2], row_3[c + _3]
        at_a = c * stride + start
        at_b, at_c, at_d = at_a + stride, at_a + _2 * stride, at_a + _3 * stride
        for j in range(m):
            a, b, e, f = flat[at_a + j], flat[at_b + j], flat[at_c + j], flat[at_d + j]
            sums[j] += a_0 * a + b_0 * b + c_0 * e + d_0 * f
            sums[_PANEL + j] += a_1 * a + b_1 * b + c_1 * e + d_1 * f
            sums[_2 * _PANEL + j] += a_2 * a + b_2 * b + c_2 * e + d_2 * f
            sums[_3 * _PANEL + j] += a_3 * a + b_3 * b + c_3 * e + d_3 * f


@kernel
def write_distances(part, parts, numbers, layout, weights, first, last, out, without_direction, work):
    """Write the upper triangles of the distances (N, N) of images first to last, or with several parts some rows.

    layout: heads, tokens and channels, and how far apart images, heads and tokens are in `numbers`.
    weights: (B, N), or (B, 0) for none.
    """
    n, stride = layout[1], np.uint64(work.columns.shape[1])
    for image in range(first, last):
        if write_units(numbers, image * layout[3], layout, work):
            without_direction[0] = True
        distances, weight = out[image - first], weights[image]
        for i in range(_4 * part, n, _4 * parts):
            for start in range(i // _16 * _16, stride, _PANEL):
                m = min(_PANEL, stride - start)
                add_products(work.units[i : i + _4], work.columns, start, m, work.sums)
                m = min(m, n - start)
                for r in range(i, min(i + _4, n)):
                    line, products = distances[r, start : start + m], work.sums[(r - i) * _PANEL :]
                    for j in range(m):
                        distance = _ONE - products[j]
                        line[j] = _ZERO if distance < _ZERO else distance
                    if weight.shape[0] > 0:
                        for j in range(m):
                            line[j] *= max(weight[r], weight[start + j])


class CosineDistances:
    """Cosine distances of float32 features (B, H, N, D), averaged over heads, written some images at a time."""

    def __init__(self, features: Tensor, weights: Tensor | None) -> None:
        batch, n_heads, n, d = features.shape
        self.shape = batch, n, n
        self._numbers, strides = as_numbers(features)
        self._layout = tuple(map(np.uint64, (n_heads, n, d, *strides[:3])))
        self._weights = np.empty((batch, 0), np.float32) if weights is None else weights.contiguous().numpy()
        self.width = d
        self.without_direction = np.zeros(1, np.bool_)  # whether a row that was written is zero, infinite or NaN

    def write(self, first: int, last: int, out: np.ndarray, work: Any, part: int = 0, parts: int = 1) -> None:
        """Write the upper triangles of images first to last into out (last - first, N, N)."""
        numbers = (np.uint64(number) for number in (part, parts, first, last))
        part, parts, first, last = numbers  # type: ignore[assignment]
        arrays = self._numbers, self._layout, self._weights
        write_distances(part, parts, *arrays, first, last, out, self.without_direction, work)

    def matrices(self) -> Tensor:
        """Return all distances (B, N, N), of which only the upper triangles are written."""
        out = torch.empty(self.shape)
        batch, n, _ = self.shape
        matrices = out.numpy()

        def write(part: int, parts: int) -> None:
            work = workspace(n, self.width)
            for image in range(batch):
                if batch < parts:  # all threads share every image
                    self.write(image, image + 1, matrices[image : image + 1], work, part, parts)
                elif image % parts == part:
                    self.write(image, image + 1, matrices[image : image + 1], work)

        run(write, max(1, min(torch.get_num_threads(), batch * n * n * self.width // 2 // _PRODUCTS_PER_PART)))
        return out
