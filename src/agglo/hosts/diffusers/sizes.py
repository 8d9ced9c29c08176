"""Proportional attention through whatever attention processor is set: log(size) on the logits of the image tokens.

Processors that call `scaled_dot_product_attention` need not cooperate (some take a mask and ignore it): a
TorchFunctionMode gives their call the sizes. The older ones that multiply matrices themselves get an additive mask,
which they honour. If neither happened, the pass stops with an error: it would silently be another model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agglo.attention import proportional_attention

# They add the mask they are given to the logits, without scaled_dot_product_attention.
_TAKE_A_MASK = (
    "AttnProcessor",
    "SlicedAttnProcessor",
    "CustomDiffusionAttnProcessor",
    "XFormersAttnProcessor",
    "CustomDiffusionXFormersAttnProcessor",
)
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def call_with_sizes(call: Callable[..., Any], attention: Any, sizes: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return call(*args, **kwargs), the forward pass of an attention, in which keys have sizes (B, K)."""
    processor = type(attention.processor).__name__
    if processor in _TAKE_A_MASK:
        return call(*args, **{**kwargs, "attention_mask": sizes.log().to(args[0].dtype).unsqueeze(1)})
    caught: list[bool] = []  # apart from the mode, on which torch.compile reads no attributes
    with _GiveSizes(sizes, caught):
        result = call(*args, **kwargs)
    if not caught:
        raise RuntimeError(
            f"{processor} attends in a way that cannot weigh groups by their sizes (one scaled_dot_product_attention "
            f"over {sizes.shape[0]} x {sizes.shape[1]} tokens was expected): use agglo.apply(..., proportional=False) "
            "with it"
        )
    return result


class _GiveSizes(TorchFunctionMode):
    """Make each self-attention over as many tokens as there are sizes proportional; others stay as they are."""

    def __init__(self, sizes: Tensor, caught: list[bool]) -> None:
        super().__init__()
        self.sizes, self.caught = sizes, caught

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        q, k = given["query"], given["key"]
        n_keys = self.sizes.shape[1]
        if k.shape[0] != self.sizes.shape[0] or k.shape[-2] != n_keys or q.shape[-2] != n_keys:
            return func(*args, **kwargs)
        self.caught.append(True)
        mask = given.get("attn_mask")
        if mask is None and not given.get("is_causal") and not given.get("enable_gqa"):
            dropout, scale = given.get("dropout_p", 0.0), given.get("scale")
            return proportional_attention(q, k, given["value"], self.sizes, scale=scale, dropout=dropout)
        bias = self.sizes.log().to(q.dtype)[:, None, None, :]
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else bias + mask
        return func(**{**given, "attn_mask": bias})
