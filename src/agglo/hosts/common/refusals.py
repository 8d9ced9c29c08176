"""What agglo refuses: models that it does not reduce, and arguments that a reduced model cannot honour."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from torch import nn

from agglo.compiling import constant_result
from agglo.hosts.common.swap import UnsupportedModelError

_WINDOWS = "attends within windows of the grid, in which merged tokens have no position"
_STRIDES = "makes its keys by strides or convolutions over the grid, in which merged tokens have no position"
_STAGES = "changes the number of its tokens by their positions in the grid from stage to stage"
_CONVOLUTIONS = "has no attention, only convolutions"
_REASONS = {  # by how the names of classes begin
    **dict.fromkeys(("Swin", "DonutSwin", "MaskFormerSwin", "MaxxVit", "DaVit", "Davit", "VitDet"), _WINDOWS),
    **dict.fromkeys(("VisionTransformerSAM", "Sam"), _WINDOWS),
    **dict.fromkeys(("Segformer", "Pvt", "PyramidVisionTransformer", "MultiScaleVit", "Twins"), _STRIDES),
    **dict.fromkeys(("Hiera", "Levit"), _STAGES),
    **dict.fromkeys(("ConvNext", "ResNet", "EfficientNet"), _CONVOLUTIONS),
    "Xcit": "attends between channels instead of tokens, and mixes neighbouring patches by convolutions",
    "GroupViT": "groups its tokens itself",
    "Vilt": "mixes the tokens of a text with those of the image",
}

# Classes that FSDP puts into, or around, a module whose weights it gathers when that is called. By name, so that agglo
# need not import FSDP.
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


def because(model: nn.Module) -> str:
    """Return why a model is not reduced, as the end of a sentence, if that is known."""
    names = [type(module).__name__ for module in model.modules()]
    return next((f": {name} {why}" for name in names for start, why in _REASONS.items() if name.startswith(start)), "")


def require_whole_blocks(tower: nn.Module) -> None:
    """Raise UnsupportedModelError if FSDP shards the tower block by block.

    Blocks stand in lists. What is sharded beside them (a patch embedding, an encoder as a whole) is called as ever.
    """
    for list_name, listed in tower.named_modules():
        if not isinstance(listed, (nn.ModuleList, nn.Sequential)):
            continue
        for name, module in listed.named_modules(prefix=list_name):
            if any(cls.__name__ in _SHARDED for cls in type(module).__mro__):
                raise UnsupportedModelError(
                    f"{name!r} of this {type(tower).__name__} is sharded by itself ({type(module).__name__}): FSDP "
                    "gathers its weights when it is called, and a block that reduces is not called, it runs in parts. "
                    "Shard the model as one unit: agglo.apply(model, ...), then fully_shard(model) and none of its "
                    "blocks; see docs/deploying.md"
                )


def bound_arguments(module: type[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by their names in its `forward`, however they were given."""
    return {**dict(zip(_argument_names(module), args, strict=False)), **kwargs}


@constant_result
def _argument_names(module: type[nn.Module]) -> tuple[str, ...]:
    return _found_argument_names(cast(Any, module))


@cache
def _found_argument_names(module: type[nn.Module]) -> tuple[str, ...]:
    _, *names = inspect.signature(module.forward).parameters
    return tuple(names)


def refuse_given(**arguments: Any) -> None:
    """Refuse arguments that say which tokens may see which: a group of tokens has several answers.

    Args:
        arguments: The values by name. None and False are no requests, nor is a list of None, one for each layer.

    Raises:
        ValueError: One of them is given.
    """
    for name, value in arguments.items():
        is_empty = isinstance(value, list) and all(each is None for each in value)
        if value is not None and value is not False and not is_empty:
            raise refusal(name)


def refusal(name: str) -> ValueError:
    """Return the error that says that an argument cannot be honoured."""
    return ValueError(f"{name} does not go with token reduction: call agglo.remove(model) first")
