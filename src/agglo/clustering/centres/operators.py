"""Clusters around chosen tokens as torch operators; why operators: see `clustering/linkage/operators.py`.

In all of them an image has k clusters, none of them empty: a centre belongs to itself, even where another centre lies
on the same spot and comes first.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

_ROUNDING = 1e-4  # relative: costs nearer than this are equal, as those of two tokens on their own are by symmetry


def euclidean_distances(tokens: Tensor, *, squared: bool = False) -> Tensor:
    """Return the float32 Euclidean distances (B, N, N) between tokens (B, N, C), or their squares, without gradient.

    One matrix product of the centred tokens: many times as fast as differences and, other than in a dendrogram, no
    merge depends on the last digits of the smallest ones. The diagonal is exactly 0.
    """
    with torch.autocast(tokens.device.type, enabled=False):
        tokens = tokens.detach().float()
        centred = tokens - tokens.mean(dim=1, keepdim=True)
        product = torch.bmm(centred, centred.transpose(1, 2))
    # Written over the product, so that one matrix is alive and not three.
    return become_euclidean(product, squared)


@torch.library.custom_op("agglo::become_euclidean", mutates_args=("products",))
def _become_euclidean(products: Tensor, squared: bool) -> None:
    _on(products.device).become_euclidean(products, squared)


@_become_euclidean.register_fake
def _(products: Tensor, squared: bool) -> None:
    pass


def become_euclidean(products: Tensor, squared: bool) -> Tensor:
    """Turn products (B, N, N) of vectors into their distances |x|^2 + |y|^2 - 2xy, or the roots, in place."""
    _become_euclidean(products, squared)
    return products


def _on(device: torch.device) -> ModuleType:
    return import_module("agglo.clustering.centres." + ("cpu" if device.type == "cpu" else "torch"))


@torch.library.custom_op("agglo::k_medoids", mutates_args=())
def k_medoids(
    distances: Tensor, first: Tensor, weights: Tensor | None, iterations: int, over_all: bool
) -> tuple[Tensor, Tensor]:
    """Return medoids (B, K) and labels (B, N) after some iterations from the medoids `first` (B, K).

    Distances are (B, N, N), weights (B, N) or None for equal ones. An iteration assigns every token to its nearest
    medoid; then the medoid of cluster c becomes

        the member i of c with the least  sum_{j in c} w_j d_ij,  or with over_all  w_i sum_j d_ij over all j,

    the first of equals, up to rounding in sums over a cluster: both of two tokens on their own are as cheap. Sums over
    all tokens differ by less than that between tokens that are not equal.
    """
    rounding = 0.0 if over_all else _ROUNDING
    return _on(distances.device).k_medoids(distances, first, weights, iterations, over_all, rounding)


@k_medoids.register_fake
def _(
    distances: Tensor, first: Tensor, weights: Tensor | None, iterations: int, over_all: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(first), first.new_empty(distances.shape[:2])


@torch.library.custom_op("agglo::farthest_points", mutates_args=())
def farthest_points(distances: Tensor, k: int, start: Tensor, from_all: bool) -> Tensor:
    """Return positions (B, k) that begin with start (B,) and go on with the token farthest from those before.

    from_all: how far is the distance (of distances (B, N, N)) to the nearest of those before; else to the farthest.
    """
    return _on(distances.device).farthest_points(distances, k, start, from_all)


@farthest_points.register_fake
def _(distances: Tensor, k: int, start: Tensor, from_all: bool) -> Tensor:
    return start.new_empty((distances.shape[0], k))


@torch.library.custom_op("agglo::density_peaks", mutates_args=())
def density_peaks(squares: Tensor, k: int, neighbours: int, width: int) -> tuple[Tensor, Tensor]:
    """Return centres (B, k), best first, and labels (B, N).

    From the squared distances (B, N, N) of tokens with `width` channels, with d_ij in units of sqrt(width):

        density_i = exp(-mean of d_ij^2 over the nearest j, i itself included)
        delta_i = min d_ij over all denser j; for the densest the greatest distance in the image
        centres: the k tokens with the greatest density_i delta_i; all others join the nearest centre

    Of equals the first counts as denser, where released code adds noise. Densities are compared by their logarithms,
    which far tokens do not round to 0.
    """
    return _on(squares.device).density_peaks(squares, k, neighbours, width)


@density_peaks.register_fake
def _(squares: Tensor, k: int, neighbours: int, width: int) -> tuple[Tensor, Tensor]:
    batch, n_tokens, _ = squares.shape
    return (
        squares.new_empty((batch, k), dtype=torch.int64),
        squares.new_empty((batch, n_tokens), dtype=torch.int64),
    )
