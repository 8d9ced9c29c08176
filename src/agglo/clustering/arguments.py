"""Checks of what callers ask for, and the errors that name the offending value and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agglo.checks import choice, number
from agglo.clustering.dispatch import NAMES as BACKENDS
from agglo.clustering.distances import METRICS

LINKAGES = ("single", "average", "complete")


def data_and_metric(features: Tensor | None, distances: Tensor | None, metric: str) -> tuple[Tensor, str, bool]:
    """Return the one tensor given, as a batch; its metric ("precomputed" for distances); whether it was one item."""
    choice("metric", metric, METRICS)
    if (features is None) == (distances is None):
        given = "neither" if features is None else "both"
        raise ValueError(f"give either features or distances, not {given}")
    name, data = ("features", features) if features is not None else ("distances", distances)
    if not isinstance(data, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(data).__name__}")
    if not (data.is_floating_point() or (name == "distances" and not data.is_complex())):
        raise ValueError(f"{name} must hold real floating point numbers, got dtype {data.dtype}")
    shapes = "(B, N, D) or (N, D)" if name == "features" else "(B, N, N) or (N, N)"
    if data.dim() not in (2, 3):
        raise ValueError(f"{name} must have shape {shapes}, got {tuple(data.shape)}")
    if name == "distances" and data.shape[-1] != data.shape[-2]:
        raise ValueError(f"distances must be square, {shapes}, got {tuple(data.shape)}")
    if data.shape[-2] == 0 or data.shape[-1] == 0:
        raise ValueError(f"{name} must hold at least one token, got shape {tuple(data.shape)}")
    single = data.dim() == 2
    data = data.detach()  # no gradient flows through a clustering
    return (data.unsqueeze(0) if single else data), (metric if name == "features" else "precomputed"), single


def require_how(linkage: str, check: bool | None, backend: str | None) -> None:
    """Raise for a linkage, a check or a backend that does not exist."""
    choice("linkage", linkage, LINKAGES)
    choice("check", check, (None, True, False))
    choice("backend", backend, (None, *BACKENDS))


def token_weights(weights: Tensor | None, data: Tensor, single: bool) -> Tensor | None:
    """Return float32 weights (B, N) for data (B, N, ...), without gradient; `single`: one item was given."""
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        raise ValueError(f"weights must be a torch.Tensor, got {type(weights).__name__}")
    if not weights.is_floating_point():
        raise ValueError(f"weights must hold real floating point numbers, got dtype {weights.dtype}")
    wanted = data.shape[1:2] if single else data.shape[:2]
    if weights.shape != wanted:
        names = "(N,)" if single else "(B, N)"
        raise ValueError(f"weights must be one per token, {names} = {tuple(wanted)}, got shape {tuple(weights.shape)}")
    if weights.device != data.device:
        raise ValueError(f"weights are on {weights.device}, what they weigh is on {data.device}; both must be on one")
    weights = weights.detach().to(torch.float32)
    return weights.unsqueeze(0) if single else weights


def group_count(k: int | Sequence[int] | Tensor, batch: int, n_tokens: int, device: torch.device) -> int | Tensor:
    """Return k as one int, or one per item as an int64 tensor (B,) on the device; more than N means N."""
    if isinstance(k, Tensor) and k.dim() == 0 and k.device.type == "cpu":
        k = k.item()  # type: ignore[assignment]
    if isinstance(k, Tensor):
        if k.is_floating_point() or k.dtype == torch.bool:
            raise ValueError(f"k must hold ints, got dtype {k.dtype}")
        ks = k
    elif isinstance(k, Sequence):
        ks = torch.tensor([number("k", each, whole=True, minimum=1) for each in k], dtype=torch.int64)
    else:
        if not isinstance(k, torch.SymInt):
            k = number("k", k, whole=True, minimum=1)
        return min(k, n_tokens)
    if ks.shape != (batch,):
        raise ValueError(f"k must be one int, or one per batch item: shape ({batch},), got shape {tuple(ks.shape)}")
    # On an accelerator a look at the values would wait for the device: there they are only clamped.
    if ks.device.type == "cpu" and batch and int(ks.min()) < 1:
        raise ValueError(f"k={ks.tolist()} must be at least 1 for every item, is {int(ks.min())} for one")
    return ks.to(device=device, dtype=torch.int64).clamp(1, n_tokens)


def require_clusterable_features(features: Tensor, metric: str) -> None:
    """Raise for a NaN, an infinity or (cosine) a zero vector in features (B, N, D), naming the first bad item."""
    finite = features.isfinite().all(dim=-1).all(dim=-1)
    if not bool(finite.all()):
        raise ValueError(f"features of batch item {_first(~finite)} hold NaN or infinity; they must be finite")
    if metric == "cosine":
        zero = (features == 0).all(dim=-1)
        if bool(zero.any()):
            item = _first(zero.any(dim=-1))
            raise ValueError(
                f"features of batch item {item} hold a zero vector at token {_first(zero[item])}: "
                "its cosine distance to others is undefined (metric='euclidean' accepts it)"
            )


def require_clusterable_distances(found: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    """Raise unless every item is finite and symmetric up to rounding, as a backend's `inspect` found."""
    finite, asymmetry, scale = found
    if not bool(finite.all()):
        raise ValueError(f"distances of batch item {_first(~finite)} hold NaN or infinity; they must be finite")
    half = torch.finfo(dtype).eps * 16 if dtype in (torch.float16, torch.bfloat16) else 0.0
    tolerance = max(1e-4, half)
    skewed = asymmetry > tolerance * scale
    if bool(skewed.any()):
        item = _first(skewed)
        raise ValueError(
            f"distances of batch item {item} are not symmetric: D[i, j] and D[j, i] differ by up to "
            f"{float(asymmetry[item]):.3g}, accepted are differences from rounding, "
            f"up to {tolerance * float(scale[item]):.3g}"
        )


def require_sound_weights(weights: Tensor) -> None:
    """Raise for weights (B, N) that are NaN, infinite or negative."""
    sound = weights.isfinite() & (weights >= 0)
    if not bool(sound.all()):
        item = _first(~sound.all(dim=1))
        token = _first(~sound[item])
        raise ValueError(
            f"weights of batch item {item} hold {float(weights[item, token])} at token {token}; "
            "they must be finite and at least 0"
        )


def _first(mask: Tensor) -> int:
    return int(mask.to(torch.uint8).argmax())
