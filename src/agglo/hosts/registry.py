"""Which modules of a model can be reduced."""

from __future__ import annotations

import re

from torch import nn

from agglo.hosts.common.base import Host
from agglo.hosts.common.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.encoders import OpenClipViT, TorchvisionViT
from agglo.hosts.timm import TimmViT
from agglo.hosts.transformers.host import TransformersViT
from agglo.hosts.vit_adapter import AdapterViT

HOSTS: tuple[Host, ...] = (TimmViT(), TorchvisionViT(), OpenClipViT(), TransformersViT(), AdapterViT())

_REASONS = {  # by how the names of classes begin
    r"(Swin|DonutSwin|MaskFormerSwin|MaxxVit|Da[Vv]it|VitDet|VisionTransformerSAM|Sam)": (
        "attends within windows of the grid, in which merged tokens have no position"
    ),
    r"(Segformer|Pvt|PyramidVisionTransformer|MultiScaleVit|Twins)": (
        "makes its keys by strides or convolutions over the grid, in which merged tokens have no position"
    ),
    r"(Hiera|Levit)": "changes the number of its tokens by their positions in the grid from stage to stage",
    r"(ConvNext|(Modified)?ResNet|EfficientNet)": "has no attention, only convolutions",
    r"Xcit": "attends between channels instead of tokens, and mixes neighbouring patches by convolutions",
    r"GroupViT": "groups its tokens itself",
    r"Vilt": "mixes the tokens of a text with those of the image",
}


def register_host(host: Host) -> Host:
    """Make a host known, in front of those that come with agglo. Returns it.

    docs/hosts.md builds one from the beginning. Here timm's own takes a class of another package too:

    >>> from agglo.hosts.timm import TimmViT
    >>> class MyHost(TimmViT):
    ...     model_classes = ("mypackage.MyViT",)
    >>> host = agglo.register_host(MyHost())
    """
    global HOSTS
    HOSTS = (host, *HOSTS)
    return host


def host_of(module: nn.Module) -> Host | None:
    """Return the host that recognises the module, if any."""
    return next((host for host in HOSTS if host.recognises(module)), None)


def find_tower(model: nn.Module, tower: str | nn.Module | None = None) -> tuple[nn.Module, Host]:
    """Return the module to reduce inside a model, and its host.

    Wrappers (DataParallel, DDP, PEFT, compiled modules) and composite models hold the transformer as a submodule.
    `tower` (a submodule, or its name) says where to look when there are several. A transformer inside of another one,
    as the ViT of a ViTAdapter, is part of it.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"a torch.nn.Module is needed, got {type(model).__name__}")
    inside = model if tower is None else _submodule(model, tower)
    found: list[tuple[str, nn.Module, Host]] = []
    for name, module in inside.named_modules():  # outer ones first
        host = host_of(module)
        if host is not None and not any(part is module for _, outer, _ in found for part in outer.modules()):
            found.append((name, module, host))
    if not found:
        inner = unwrapped(inside)
        names = [type(module).__name__ for module in inner.modules()]
        reasons = (f": {name} {why}" for name in names for start, why in _REASONS.items() if re.match(start, name))
        supported = ", ".join(name for host in HOSTS for name in host.model_classes)
        raise UnsupportedModelError(
            f"{type(inner).__name__} (from {type(inner).__module__}) holds no transformer that agglo can reduce"
            f"{next(reasons, '')}; supported: {supported}. docs/hosts.md lists the families that are tested, and walks "
            "through a host for a model of your own"
        )
    if len(found) > 1:
        listed = ", ".join(f"{name!r} ({type(module).__name__})" for name, module, _ in found)
        raise ValueError(f"{type(inside).__name__} holds {len(found)} towers: {listed}; choose one with tower=")
    _, module, host = found[0]
    return module, host


def _submodule(model: nn.Module, tower: str | nn.Module) -> nn.Module:
    """Return the submodule that was given, itself or by its name."""
    for name, module in model.named_modules(remove_duplicate=False):
        if module is tower or (isinstance(tower, str) and name == tower):
            return module
    raise ValueError(f"tower={tower!r} must be a submodule of {type(model).__name__}, or the name of one")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside data-parallel and compile wrappers."""
    while type(model).__name__ in ("DataParallel", "DistributedDataParallel", "OptimizedModule"):
        model = next(model.children())
    return model


def applied_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are reduced now: those whose class was swapped."""
    return [module for module in model.modules() if isinstance(module, ReducedModule)]


def applied_towers(model: nn.Module) -> list[tuple[nn.Module, Host]]:
    """Return the towers of a model that are reduced now, and their hosts."""
    towers = [(module, host) for module in model.modules() if (host := host_of(module)) is not None]
    return [(module, host) for module, host in towers if isinstance(host.loop(module), ReducedModule)]
