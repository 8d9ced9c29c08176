"""Which vision-language models can be given fewer tokens."""

from __future__ import annotations

from torch import nn

from agglo.hosts.swap import UnsupportedModelError
from agglo.hosts.vlm.family import Family
from agglo.hosts.vlm.gemma import Gemma3, PaliGemma
from agglo.hosts.vlm.llava import Llava, VipLlava
from agglo.hosts.vlm.outlet import Outlet
from agglo.hosts.vlm.qwen import QwenVL
from agglo.hosts.vlm.shuffling import Idefics3, InternVL, SmolVLM

FAMILIES: tuple[Family, ...] = (
    Llava(),
    VipLlava(),
    PaliGemma(),
    Gemma3(),
    InternVL(),
    Idefics3(),
    SmolVLM(),
    QwenVL(),
)


def find(model: nn.Module, output: str) -> tuple[nn.Module, Family]:
    """The module inside a model that joins pictures and text, and its family."""
    found = [(module, family) for module in model.modules() for family in FAMILIES if family.recognises(module)]
    if not found:
        supported = ", ".join(name for family in FAMILIES for name in family.model_classes)
        raise UnsupportedModelError(
            f"output={output!r} is for vision-language models, whose prompts can have fewer placeholders, and "
            f"{type(model).__name__} holds none that agglo knows; supported, from transformers: {supported}"
        )
    return found[0]


def outlets(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are given fewer tokens now."""
    return [module for module in model.modules() if outlet_of(module) is not None]


def outlet_of(module: nn.Module) -> Outlet | None:
    applied = getattr(module, "agglo_applied", None)
    return applied if isinstance(applied, Outlet) else None
