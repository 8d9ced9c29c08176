"""Which modules of a model can be reduced."""

from __future__ import annotations

from torch import nn

from agglo.hosts.common.base import Host
from agglo.hosts.common.refusals import because
from agglo.hosts.common.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.open_clip import OpenClipViT
from agglo.hosts.timm import TimmViT
from agglo.hosts.torchvision import TorchvisionViT
from agglo.hosts.transformers.host import TransformersViT
from agglo.hosts.vit_adapter import AdapterViT

HOSTS: tuple[Host, ...] = (TimmViT(), TorchvisionViT(), OpenClipViT(), TransformersViT(), AdapterViT())

_TOWER_NAMES = ("visual", "vision_tower", "vision_model", "trunk")


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

    Wrappers (DataParallel, DDP, PEFT, compiled modules) and composite models hold the transformer as a submodule, so
    one search finds it in all of them. `tower` (a submodule, or its name) says where to look when there are several.
    A transformer inside of another that is found, as the ViT of a ViTAdapter, is part of it and not one more.
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
        supported = ", ".join(name for host in HOSTS for name in host.model_classes)
        raise UnsupportedModelError(
            f"{_described(inside)} holds no transformer that agglo can reduce{because(inside)}; supported: {supported}"
            ". docs/hosts.md lists the families that are tested, and walks through a host for a model of your own"
        )
    if len(found) > 1:
        names = ", ".join(f"{name!r} ({type(module).__name__})" for name, module, _ in found)
        raise ValueError(f"{type(inside).__name__} holds {len(found)} towers: {names}; choose one with tower=")
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


def _described(model: nn.Module) -> str:
    """Name the class of a model, and of the vision tower where a composite model has one under a usual name."""
    inner = model = unwrapped(model)
    while parts := [part for name in _TOWER_NAMES if isinstance(part := getattr(inner, name, None), nn.Module)]:
        inner = parts[0]
    cls = type(inner)
    owner = "" if inner is model else f", in {type(model).__name__}"
    return f"{cls.__name__} (from {cls.__module__}{owner})"


def applied_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are reduced now: those whose class was swapped."""
    return [module for module in model.modules() if isinstance(module, ReducedModule)]


def applied_towers(model: nn.Module) -> list[tuple[nn.Module, Host]]:
    """Return the towers of a model that are reduced now, and their hosts."""
    towers = [(module, host) for module in model.modules() if (host := host_of(module)) is not None]
    return [(module, host) for module, host in towers if isinstance(host.loop(module), ReducedModule)]
