"""Count what a forward pass asks of a GPU, on fake CUDA tensors: launches, copies from the host, waits of the host.

An operation on CUDA tensors that is no view counts as one launch, padding as two (a fill and a copy), a Triton kernel
as one. Operators of agglo run their bodies. Attention is one launch, and as in torch two more where the rows of a mask
have to be aligned first. No GPU is needed, and no values exist: whatever looks at one is a wait.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

import agglo
from agglo.clustering import gpu, operators
from agglo.clustering.grid import windows

DEVICE, MULTIPROCESSORS = torch.device("cuda", 0), 108
_ALLOCATIONS = ("device", "empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
_VIEWS = ("_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias")
_LOOKS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")


class Counts(TorchDispatchMode):
    """Launches by name of the operation, and the operations that copied from the host or looked at values."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.copies: list[str] = []
        self.waits: list[str] = []

    def clear(self) -> None:
        for counted in (self.launches, self.copies, self.waits):
            counted.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _LOOKS and any(tensor.is_cuda for tensor in given):
            self.waits.append(name)
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in (*given, *made) if tensor.numel() and tensor.dim()}
        if name in ("_to_copy", "copy_", "_copy_from") and devices == {"cpu", "cuda"}:
            (self.copies if made[0].is_cuda else self.waits).append(name)
        is_view = func.is_view or name in _VIEWS or name in _ALLOCATIONS
        if not is_view and any(tensor.is_cuda and tensor.numel() for tensor in (*given, *made)):
            self.launches[name] += 2 if name == "constant_pad_nd" else 1
        return result

    @property
    def n_launches(self) -> int:
        return sum(self.launches.values())


def _attention(counts: Counts) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        counts.launches["attention"] += 1
        if attn_mask is not None and any(stride % 8 for stride in attn_mask.stride()[:-1]):
            F.pad(attn_mask, (0, 8 - attn_mask.shape[-1] % 8))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)

    return attend


@contextlib.contextmanager
def fake_gpu() -> Iterator[Counts]:
    """Count what is done with fake CUDA tensors, which `torch.empty(..., device=DEVICE)` makes here."""
    counts = Counts()

    def launch(kernel: JITFunction[Any], *_: Any, **__: Any) -> None:
        counts.launches[kernel.fn.__name__] += 1

    with contextlib.ExitStack() as stack:
        for target, name, instead in (
            (JITFunction, "run", launch),
            (type(operators.cluster), "__call__", lambda op, *arguments: op._init_fn(*arguments)),
            (F, "scaled_dot_product_attention", _attention(counts)),
            (gpu, "why_not", lambda: ""),
            (torch.cuda, "is_current_stream_capturing", lambda: True),
            (gpu, "attempt", lambda kernel, instead: kernel()),
            (
                torch.cuda,
                "get_device_properties",
                lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS),
            ),
            (torch.cuda, "device_of", lambda tensor: contextlib.nullcontext()),
        ):
            stack.enter_context(patch.object(target, name, instead))
        for cached in (windows._by_shape, windows._shares):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(counts)
        yield counts


def on_fake_gpu(model: nn.Module) -> nn.Module:
    """Return the model with fake parameters on a GPU; for use within `fake_gpu`."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
                    tensors[name] = nn.Parameter(fake, requires_grad=False) if tensors is module._parameters else fake
    return model


def count_pass(method: str | None, dtype: torch.dtype = torch.float16, batch: int = 64, **options: Any) -> Counts:
    """Count a forward pass of DeiT-S, dense or with three reductions."""
    model = timm.create_model("deit_small_patch16_224").eval().to(dtype)
    with fake_gpu() as counts, torch.no_grad():
        on_fake_gpu(model)
        if method is not None:
            agglo.apply(model, method, **{"keep_rate": 0.5, **options})
        images = torch.empty(batch, 3, 224, 224, device=DEVICE, dtype=dtype)
        counts.clear()
        model(images)
    return counts


def count_clustering(weights: bool = False, **options: Any) -> Counts:
    """Count the second call of `agglo.cluster` on 64 tokens: the first one may fill caches."""
    with fake_gpu() as counts:
        features = torch.empty(3, 64, 16, device=DEVICE)
        if weights:
            options["weights"] = torch.empty(3, 64, device=DEVICE)
        for _ in range(2):
            counts.clear()
            try:
                agglo.cluster(features, **{"k": None if "threshold" in options else 32, **options})
            except Exception:
                if not counts.waits:  # no fake tensor has the values that are waited for
                    raise
    return counts
